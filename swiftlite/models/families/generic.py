"""The family of every causal language model of transformers that has no row of its own."""

from swiftlite.models.families.family import Family

FAMILY = Family("generic")
