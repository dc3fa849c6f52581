"""Fixtures of this folder."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked():
    """No type checks at run time, as users have it: they would speak before our own error messages."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
