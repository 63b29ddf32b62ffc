"""The store that tests of buckets share: a pytest plugin."""

import pytest

from support.buckets import Proxy, environment, moto


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """Run a store for all tests, and give its endpoint."""
    with moto(tmp_path_factory.mktemp("moto") / "log") as endpoint:
        yield endpoint


@pytest.fixture
def near(store, monkeypatch):
    """Have this process find the store, as a user does."""
    for name, value in environment(store).items():
        monkeypatch.setenv(name, value)
    return store


@pytest.fixture
def proxy(near, monkeypatch):
    """Put a proxy between this process and the store."""
    made = Proxy(near)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
    yield made
    made.close()
