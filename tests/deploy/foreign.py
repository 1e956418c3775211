"""Kinds that the chart makes and Kubernetes does not have: the fields that it sets, as their CRDs have them.

By hand, since the CRDs come with no package, from the Gateway API 1.6.1, the Prometheus operator 0.93.0,
cert-manager 1.21.1, KubeRay 1.7.0 and KEDA 2.18. A field that is to be set is looked up there and added here.
"""

from typing import Any

# The name of a field, with ! if it has to be there, and what it holds: a type, one of some words, a list of one
# thing, other fields, or under "*" any names.
_NAMES = {"*": str}
_ISSUER = {"group": str, "kind": {"Issuer", "ClusterIssuer"}, "name!": str}
_ROUTE = {
    "parentRefs": [{"name!": str, "namespace": str, "sectionName": str}],
    "hostnames": [str],
    "rules": [{"backendRefs": [{"name!": str, "port": int}]}],
}
_KINDS: dict[tuple[str, str], Any] = {
    ("gateway.networking.k8s.io/v1", "GRPCRoute"): _ROUTE,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _ROUTE,
    ("keda.sh/v1alpha1", "ScaledObject"): {
        "scaleTargetRef!": {"apiVersion": str, "kind": str, "name!": str},
        "minReplicaCount": int,
        "maxReplicaCount": int,
        "triggers!": [
            {
                "type!": str,
                "metricType": {"AverageValue", "Value", "Utilization"},
                "metadata!": {"serverAddress!": str, "query!": str, "threshold!": str},
            }
        ],
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": dict}},
    },
    ("monitoring.coreos.com/v1", "ServiceMonitor"): {
        "selector!": {"matchLabels": _NAMES},
        "podTargetLabels": [str],
        "endpoints!": [{"port": str, "interval": str}],
    },
    ("monitoring.coreos.com/v1", "PrometheusRule"): {
        "groups": [
            {
                "name!": str,
                "rules": [{"alert": str, "expr!": str, "for": str, "labels": _NAMES, "annotations": _NAMES}],
            }
        ]
    },
    ("cert-manager.io/v1", "Issuer"): {"selfSigned": {}, "ca": {"secretName!": str}},
    ("cert-manager.io/v1", "Certificate"): {
        "secretName!": str,
        "issuerRef!": _ISSUER,
        "isCA": bool,
        "commonName": str,
        "dnsNames": [str],
        "duration": str,
        "usages": [{"digital signature", "server auth", "client auth"}],
        "privateKey": {"algorithm": {"ECDSA"}, "size": int, "rotationPolicy": {"Always", "Never"}},
    },
    ("ray.io/v1", "RayJob"): {
        "submissionMode": {"K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"},
        "entrypoint": str,
        "backoffLimit": int,
        "shutdownAfterJobFinishes": bool,
        "rayClusterSpec": {
            "rayVersion": str,
            "authOptions": {"mode": {"disabled", "token"}},
            # Templates are pods' of Kubernetes: see `pods`.
            "headGroupSpec!": {"rayStartParams": _NAMES, "template!": dict},
            "workerGroupSpecs": [
                {
                    "groupName!": str,
                    "replicas": int,
                    "minReplicas!": int,
                    "maxReplicas!": int,
                    "rayStartParams": _NAMES,
                    "template!": dict,
                }
            ],
        },
    },
}
KINDS = {kind for _, kind in _KINDS}


def validate(document: Any) -> None:
    """Raises ValueError for a version, a field or a value that the kind does not have."""
    where = document["kind"]
    form = _KINDS.get((document["apiVersion"], where))
    if form is None or set(document) != {"apiVersion", "kind", "metadata", "spec"}:
        raise ValueError(f"{document['apiVersion']} has no {where} of {sorted(document)}")
    _fits(document["spec"], form, f"{where}.spec")


def pods(document: Any) -> list[Any]:
    """The pods that are to be made from the templates of a RayJob; of other kinds none."""
    if document["kind"] != "RayJob":
        return []
    cluster = document["spec"]["rayClusterSpec"]
    templates = [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return [{"apiVersion": "v1", "kind": "Pod", **template} for template in templates]


def _fits(value: Any, form: Any, where: str) -> None:
    if isinstance(form, dict) and isinstance(value, dict):
        fields = {name.rstrip("!"): inner for name, inner in form.items()}
        for name, inner in value.items():
            if name not in fields and "*" not in fields:
                raise ValueError(f"{where} has no field {name}")
            _fits(inner, fields.get(name, fields.get("*")), f"{where}.{name}")
        if missing := [name for name in form if name.endswith("!") and name.rstrip("!") not in value]:
            raise ValueError(f"{where} lacks {missing}")
    elif isinstance(form, list) and isinstance(value, list):
        for each in value:
            _fits(each, form[0], where)
    elif not (value in form if isinstance(form, set) else isinstance(form, type) and type(value) is form):
        raise ValueError(f"{where} can't be {value!r}")
