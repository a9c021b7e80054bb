"""The command line. Installs as `swiftlite.cli`."""
