"""Options shared by all tests: which backend the operator tests run on."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", choices=("host", "cuda"), default="host", help="backend of the operator tests")


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--backend"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu run only with --backend cuda; tests marked host only without it."""
    on_gpu = config.getoption("--backend") == "cuda"
    for item in items:
        if "gpu" in item.keywords and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs GPUs: run `make test-gpu`"))
        if "host" in item.keywords and on_gpu:
            item.add_marker(pytest.mark.skip(reason="tests the host backend"))
