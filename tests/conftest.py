"""What holds in every test: one torch thread a rank and a parent that is warm before it forks.

Warnings are errors by `filterwarnings` in pyproject.toml, in the forked ranks too.
"""

from __future__ import annotations

import pytest

from tests.support.ranks import warm_up


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    warm_up()
