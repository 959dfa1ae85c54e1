"""A Ray cluster on this machine, for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("ray")
from ray.cluster_utils import Cluster

from cluster.clusters import STORE
from patchcleanser.cluster.runner import RayRunner, connect


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without cores and two nodes of one core; the driver is this process, connected once for all tests.

    A process that comes and goes as a driver, on a busy machine, was once ended by Ray in the middle.
    """
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
    cluster.wait_for_nodes()
    connect(cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def runner(cluster: Cluster) -> Iterator[RayRunner]:
    from patchcleanser.cluster.runner import RayRunner

    with RayRunner(cluster.address) as runner:
        yield runner
