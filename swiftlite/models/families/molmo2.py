"""Molmo 2: a vision-language class that refuses to train without being told which tokens are text."""

from swiftlite.models.families.family import Family

FAMILY = Family("molmo2", text_inputs=("mm_token_type_ids",))
