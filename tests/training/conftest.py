"""The reference that trainings start from."""

import enumerable
import pytest
from enumerable import Enumerable


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Enumerable:
    """Make a reference whose responses can be listed."""
    return enumerable.enumerable(tmp_path_factory.mktemp("enumerable") / "reference")
