"""Prints the chart's README from the comments of values.yaml (`make docs`)."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
VALUES = ROOT / "k8s/fusionkv/values.yaml"
INTRODUCTION = """\
# The Helm chart

The tables of values below are written by `make docs` from [values.yaml](values.yaml); a test keeps them current.
Nothing here has run in a cluster yet: what the chart renders is checked against the schemas of Kubernetes 1.27, 1.33
and 1.37 over a matrix of values, objects of other APIs against a list of their fields, and what the pods run is
tested outside of a cluster.

## From nothing to an answer

1. No images are published. Build them from the repository's root, and push them to a registry that the cluster reads:

        for service in kvcache worker gateway; do
          docker build --target $service -t REGISTRY/fusionkv-$service:0.2.0 .
          docker push REGISTRY/fusionkv-$service:0.2.0
        done

    With a GPU it is the target `worker-gpu`. The target `worker` takes the torch that pip finds, from PyPI on x86-64
    the one that brings CUDA; `--build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` lets it find the
    one for CPUs. Encoders on Ray (`encode.ray`) want `worker-ray` or `worker-gpu-ray` too, and `vllm.enabled` wants
    `vllm-connector` beside the official image of vLLM. With kind, `kind load docker-image` takes the place of the
    push.

2. Take the example that is nearest, and install:

        helm install fusionkv k8s/fusionkv -f k8s/examples/laptop.yaml --set image.registry=REGISTRY

3. `helm test` stores a page, has a question about it answered, and deletes it:

        helm test fusionkv --logs

4. Ask something of your own. The command `fusionkv` is in `.venv/bin` after `make setup`:

        kubectl port-forward service/fusionkv-gateway 7072 &
        fusionkv ingest notes README.md
        fusionkv ask notes 'What does FusionKV keep?'

5. For traces and metrics name a collector: `--set otlp.endpoint=http://collector.observability:4317`; `otlp` has
    the share that is traced, headers and a CA as well. Prometheus and Grafana:
    [observability](../../docs/observability.md). With `--set gateway.config.admin_listen=127.0.0.1:8081` the gateway
    has pages that explain its last answers, for those who may forward that port of its pod to themselves.

| example | for |
|---|---|
| [laptop.yaml](../examples/laptop.yaml) | a node without a GPU, kind or minikube; a model from the Hugging Face hub |
| [gpu.yaml](../examples/gpu.yaml) | one node with a GPU, a 7B model, scraped by the Prometheus operator |
| [replicas.yaml](../examples/replicas.yaml) | caches on all nodes over a Redis Cluster, two to eight workers |
| [tensor-parallel.yaml](../examples/tensor-parallel.yaml) | a 32B model over four GPUs of one node |
| [vllm.yaml](../examples/vllm.yaml) | workers that prefill and a vLLM that decodes, on a GPU each |
| [milvus.yaml](../examples/milvus.yaml) | two to six gateways that share a Milvus |
| [secured.yaml](../examples/secured.yaml) | TLS by cert-manager, tokens; the chart's own Redis and Milvus, plain |

## What is made

- The cache service is a StatefulSet: each pod has a volume and a name of its own. It drains for `drain_seconds`, in
  which it hands its entries over where it shares an index; Kubernetes waits 15 s longer.
- Workers are a StatefulSet too, without any state: the gateway chooses a worker for each request by what its pool
  holds, so each needs a lasting name. They start all at once.
- The gateway is a Deployment. With the embedded engine there is one, and an upgrade ends it before the next one
  starts; with a Milvus there may be many.
- Pods of one service go to different nodes where there are some, and a disruption takes one at a time. Each has a
  service account without rights, and runs as user 10001 on a read-only root file system, as the Pod Security Standard
  *restricted* wants it. Only Milvus and vLLM, where they are the chart's own, have a root file system that they may
  write to: nobody has run them yet, so whether they need more than their volumes is not known. vLLM runs as the user
  2000, which its image brings.
- vLLM is a Deployment of one pod in its official image; an init container copies the connector beside it, and
  `PYTHONPATH` names the copy. An upgrade ends it before the next one starts; meanwhile questions fail.
- Only the gateway and vLLM call workers, only workers, encoders on Ray and vLLM call caches, and only the gateway
  calls vLLM (`networkPolicy`), in a network that enforces policies.

## More workers by how many requests wait

`worker.autoscaling` needs the requests that wait as a metric of pods. With prometheus-adapter, its rule is:

    rules:
      - seriesQuery: fusionkv_worker_requests{namespace!="",pod!=""}
        resources: {overrides: {namespace: {resource: namespace}, pod: {resource: pod}}}
        metricsQuery: sum(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)

## Values

`config` of a service takes its settings, as [configuration](../../docs/configuration.md) names them. A wrong name, or
a value of another kind, is refused before anything is installed.
"""
_KEY = re.compile(r"^( *)(\w+):(?: (.*))?$")
_PAGE = re.compile(r"docs/(\w+)\.md")


def page() -> str:
    """The README: an introduction, and a section for each top-level key with a row for each value."""
    parts, comments, above = [INTRODUCTION], list[str](), list[str]()
    for line in VALUES.read_text().splitlines():
        if match := _KEY.match(line):
            depth, name, value = len(match[1]) // 2, match[2], match[3]
            above = [*above[:depth], name]
            text = _PAGE.sub(r"[\1](../../docs/\1.md)", " ".join(comments))
            if depth == 0:
                parts += [f"### {name}", "", *([text, ""] if text else [])]
                parts += ["| value | default | what it is |", "|---|---|---|"]
            elif value is None and text:
                parts.append(f"| `{'.'.join(above)}` | | {text} |")
            if value is not None:
                parts.append(f"| `{'.'.join(above)}` | `{value}` | {text} |")
            comments = []
        elif line.strip().startswith("#"):
            comments.append(line.strip(" #"))
        else:
            parts += [""] if above else []
            comments = []
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page(), end="")
