"""The run that the tests of a report read."""

import pytest
from known_run import LEFT, QRPO, RLOO, finish_run, make_recipe, record, report


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Return the recipe and the root of a reported run with a policy of each solver."""
    root = tmp_path_factory.mktemp("run")
    recipe = make_recipe(root, policies={"aware": QRPO, "plain": RLOO})
    finish_run(root, recipe)
    for name, summary in LEFT.items():
        record(root, name, "evaluate", summary)
    report(recipe, root)
    return recipe, root
