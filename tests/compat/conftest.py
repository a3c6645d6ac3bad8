"""The API over a tiny model in memory, as the tests of `tests/api` have it."""

from tests.api.conftest import api, api_model, served

__all__ = ["api", "api_model", "served"]
