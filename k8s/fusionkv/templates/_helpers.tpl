{{/* Names and labels. Each takes a dict of `root` (the chart's context) and `name` (kvcache, worker, gateway). */}}
{{- define "fusionkv.fullname" -}}
{{- printf "%s-%s" (.root.Values.fullnameOverride | default .root.Release.Name | trunc 40 | trimSuffix "-") .name -}}
{{- end }}

{{- define "fusionkv.selector" -}}
app.kubernetes.io/name: {{ .root.Values.nameOverride | default "fusionkv" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "fusionkv.labels" -}}
{{ include "fusionkv.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "fusionkv.metadata" -}}
name: {{ include "fusionkv.fullname" . }}
namespace: {{ .root.Release.Namespace }}
labels: {{- include "fusionkv.labels" . | nindent 2 }}
{{- end }}

{{/* One of FusionKV's images, by its name, or by name and digest. */}}
{{- define "fusionkv.image" -}}
{{- $registry := .root.Values.image.registry | default (dig "imageRegistry" "" .root.Values.global) | trimSuffix "/" -}}
{{- /* A digest names one image: what would follow its name for another variant goes. */}}
{{- if $registry }}{{ $registry }}/{{ end }}{{ regexReplaceAll "(@sha256:[0-9a-f]{64}).*" .image "${1}" }}
{{- if not (contains "@" .image) }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{/* Another image, from the registry that all images are to come from, if there is one. */}}
{{- define "fusionkv.otherImage" -}}
{{- $registry := dig "imageRegistry" "" .root.Values.global | trimSuffix "/" -}}
{{- ternary (printf "%s/%s" $registry (regexReplaceAll "^[^/]*[.:][^/]*/" .image "")) .image (ne $registry "") }}
{{- end }}


{{/* The tier that cache services share: what config names, or the chart's own; empty without one. */}}
{{- define "fusionkv.remote" -}}
{{- if .Values.mooncake.enabled -}}
mooncake://{{ include "fusionkv.fullname" (dict "root" . "name" "mooncake") }}:50051?host=$(K8S_POD_IP)
{{- else if .Values.redis.enabled -}}
redis://{{ include "fusionkv.fullname" (dict "root" . "name" "redis") }}:6379
{{- else -}}
{{ .Values.kvcache.config.remote_url | default "" }}
{{- end }}
{{- end }}

{{/* Where the cache service answers. */}}
{{- define "fusionkv.cache" -}}
{{ include "fusionkv.fullname" (dict "root" . "name" "kvcache-client") }}:7070
{{- end }}

{{/* Where corpora that gateways share are: the Milvus that config names, or the chart's own. */}}
{{- define "fusionkv.milvus" -}}
{{- if .Values.milvus.enabled -}}
http://{{ include "fusionkv.fullname" (dict "root" . "name" "milvus") }}:19530
{{- else -}}
{{ .Values.gateway.config.milvus_url | default "" }}
{{- end }}
{{- end }}

{{/* Where the chart's own vLLM answers; empty without one. */}}
{{- define "fusionkv.vllm" -}}
{{- if .Values.vllm.enabled -}}
http://{{ include "fusionkv.fullname" (dict "root" . "name" "vllm") }}:8000
{{- end }}
{{- end }}

{{/* Where the model is: the claim, the directory in it, and of a model of the hub its repo and revision. */}}
{{- define "fusionkv.model" -}}
{{- $model := .Values.worker.model -}}
{{- if hasPrefix "pvc://" $model.uri -}}
{{- $parts := regexSplit "/" (trimPrefix "pvc://" $model.uri) 2 -}}
claim: {{ index $parts 0 }}
path: {{ index $parts 1 }}
{{- else -}}
{{- $parts := regexSplit "@" (trimPrefix "hf://" $model.uri) 2 -}}
{{- $revision := ternary (last $parts) "main" (eq (len $parts) 2) -}}
claim: {{ $model.storage.existingClaim | default (include "fusionkv.fullname" (dict "root" . "name" "model")) }}
{{- /* A revision in a directory of its own: workers that still run read the files of theirs. */}}
path: {{ $revision }}/{{ index $parts 0 }}
repo: {{ index $parts 0 }}
revision: {{ $revision }}
{{- end }}
{{- end }}

{{/* The init container that downloads a model of the hub, unless it is there; with `resources` of the pod's container. */}}
{{- define "fusionkv.download" -}}
{{- $worker := .root.Values.worker -}}
{{- $model := include "fusionkv.model" .root | fromYaml -}}
{{- $image := ternary (printf "%s-gpu" $worker.image) $worker.image (gt (int $worker.gpu.count) 0) -}}
{{- $path := printf "/models/%s" $model.path -}}
- name: model
  image: {{ include "fusionkv.image" (dict "root" .root "image" $image) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  {{- /* The owner of its files is the same in every pod that downloads. */}}
  securityContext:
    {{- with .root.Values.podSecurityContext.runAsUser }}
    runAsUser: {{ . }}
    {{- end }}
    {{- toYaml .root.Values.containerSecurityContext | nindent 4 }}
  # The mark says that the download is complete: no start after it needs the hub.
  command:
    - sh
    - -euc
    - test -e "$1/.complete" || { hf download "$2" --revision "$3" --local-dir "$1" && touch "$1/.complete"; }
    - sh
    - {{ $path | quote }}
    - {{ $model.repo | quote }}
    - {{ $model.revision | quote }}
  env:
    - {name: HF_HUB_OFFLINE, value: "0"}
    - {name: HF_HOME, value: /tmp/hf}
    {{- with $worker.model.secret }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
    {{- end }}
    {{- with $worker.extraEnv }}{{ toYaml . | nindent 4 }}{{ end }}
  resources: {{- toYaml .resources | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- end }}

{{/* The volume that the model is in, which only a download writes. */}}
{{- define "fusionkv.modelVolume" -}}
{{- $model := include "fusionkv.model" . | fromYaml -}}
- name: models
  persistentVolumeClaim: {claimName: {{ $model.claim }}{{ if not $model.repo }}, readOnly: true{{ end }}}
{{- end }}

{{/* Not empty where the service speaks TLS. */}}
{{- define "fusionkv.speaksTLS" -}}
{{- if .root.Values.certManager.enabled }}yes{{ else }}{{ (index .root.Values .name).config.tls_cert | default "" }}{{ end }}
{{- end }}

{{/* Where cert-manager's secret of a service is mounted. */}}
{{- define "fusionkv.certificates" -}}
/etc/fusionkv-tls
{{- end }}

{{/* Of pods that call the gateway, with `root` and `secret` (its keys `token` and `ca.crt`): flags, mounts, volumes. */}}
{{- define "fusionkv.callerFlags" -}}
- --gateway={{ include "fusionkv.fullname" (dict "root" .root "name" "gateway") }}:{{ .root.Values.gateway.service.port }}
{{- if .root.Values.certManager.enabled }}
- --tls-ca={{ include "fusionkv.certificates" . }}/ca.crt
{{- else if .root.Values.gateway.config.tls_cert }}
- --tls-ca=/etc/fusionkv/ca.crt
{{- end }}
{{- end }}

{{- define "fusionkv.callerMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .secret }}
- {name: secret, mountPath: /etc/fusionkv, readOnly: true}
{{- end }}
{{- if .root.Values.certManager.enabled }}
- {name: certificates, mountPath: {{ include "fusionkv.certificates" . }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "fusionkv.callerVolumes" -}}
- {name: tmp, emptyDir: {}}
{{- with .secret }}
- name: secret
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- if .root.Values.certManager.enabled }}
- name: certificates
  # Whom to trust, and not the gateway's key.
  {{- with .root.Values.certManager.trust }}
  configMap: {name: {{ . }}, items: [{key: ca.crt, path: ca.crt}]}
  {{- else }}
  secret: {secretName: {{ include "fusionkv.fullname" (dict "root" .root "name" "gateway") }}-tls, items: [{key: ca.crt, path: ca.crt}]}
  {{- end }}
{{- end }}
{{- end }}

{{/* The volume of a service's own certificate, its key and whom it trusts: `root`, `name`. */}}
{{- define "fusionkv.certificateVolume" -}}
{{- $secret := printf "%s-tls" (include "fusionkv.fullname" .) -}}
- name: certificates
  {{- with .root.Values.certManager.trust }}
  projected:
    defaultMode: 0440
    sources:
      - secret: {name: {{ $secret }}, items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]}
      - configMap: {name: {{ . }}, items: [{key: ca.crt, path: ca.crt}]}
  {{- else }}
  secret: {secretName: {{ $secret }}, defaultMode: 0440}
  {{- end }}
{{- end }}

{{/* What `config` and certManager set, as environment; what a service's Secrets are mounted as: `root`, `name`. */}}
{{- define "fusionkv.settings" -}}
{{- $values := index .root.Values .name -}}
{{- $section := upper .name -}}
{{- range $key, $value := $values.config }}
{{- /* Numbers as JSON writes them: Helm's toString turns 1073741824 into 1.073741824e+09. */}}
- {name: FUSIONKV_{{ $section }}_{{ upper $key }}, value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}}
{{- end }}
{{- if .root.Values.certManager.enabled }}
{{- $at := include "fusionkv.certificates" . }}
{{- range list "tls_cert" "tls_key" "tls_ca" "tls_client_ca" }}
{{- if hasKey $values.config . }}{{ fail (printf "certManager sets %s itself: take it out of %s.config" . $.name) }}{{ end }}
{{- end }}
- {name: FUSIONKV_{{ $section }}_TLS_CERT, value: {{ $at }}/tls.crt}
- {name: FUSIONKV_{{ $section }}_TLS_KEY, value: {{ $at }}/tls.key}
{{- if ne .name "kvcache" }}
- {name: FUSIONKV_{{ $section }}_TLS_CA, value: {{ $at }}/ca.crt}
{{- end }}
{{- if ne .name "gateway" }}
- {name: FUSIONKV_{{ $section }}_TLS_CLIENT_CA, value: {{ $at }}/ca.crt}
{{- end }}
{{- end }}
{{- end }}

{{- define "fusionkv.secretMounts" -}}
{{- $values := index .root.Values .name -}}
{{- if $values.secret }}
# The whole volume and no single file: only so do changes of the Secret reach the pod.
- {name: secret, mountPath: /etc/fusionkv, readOnly: true}
{{- end }}
{{- if .root.Values.certManager.enabled }}
- {name: certificates, mountPath: {{ include "fusionkv.certificates" . }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "fusionkv.secretVolumes" -}}
{{- $values := index .root.Values .name -}}
{{- with $values.secret }}
- name: secret
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- if .root.Values.certManager.enabled }}
{{ include "fusionkv.certificateVolume" . }}
{{- end }}
{{- end }}

{{/* A pod template: `root`, `name`, `port`, `image`, `env` (own settings), `startup` (seconds), `volumes`, `mounts`, `requests`, `limits`, `http` (port), `init` (containers). */}}
{{- define "fusionkv.pod" -}}
{{- $values := index .root.Values .name -}}
{{- $section := upper .name -}}
{{- include "fusionkv.podMetadata" (merge (dict "values" $values) .) }}
spec:
  serviceAccountName: {{ include "fusionkv.fullname" . }}
  automountServiceAccountToken: false
  # Kubernetes would add FUSIONKV_WORKER_PORT and the like for its Services, which the services refuse as unknown settings.
  enableServiceLinks: false
  # Longer than the service's own drain, so that it is never killed while it finishes calls.
  terminationGracePeriodSeconds: {{ add 15 (ceil $values.config.drain_seconds) }}
  securityContext: {{- toYaml .root.Values.podSecurityContext | nindent 4 }}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- include "fusionkv.scheduling" (dict "root" .root "name" .name "values" $values) | nindent 2 }}
  {{- if or .init $values.initContainers }}
  initContainers:
    {{- with .init }}{{ . | nindent 4 }}{{ end }}
    {{- with $values.initContainers }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  containers:
    - name: {{ .name }}
      image: {{ include "fusionkv.image" . }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      securityContext: {{- toYaml .root.Values.containerSecurityContext | nindent 8 }}
      ports:
        - {name: grpc, containerPort: {{ .port }}, protocol: TCP}
        {{- if include "fusionkv.speaksTLS" . }}
        - {name: health, containerPort: 7079, protocol: TCP}
        {{- end }}
        {{- if eq .name "kvcache" }}
        - {name: data, containerPort: 7073, protocol: TCP}
        {{- with include "fusionkv.eventsPort" .root }}
        - {name: events, containerPort: {{ . }}, protocol: TCP}
        - {name: replays, containerPort: {{ add1 . }}, protocol: TCP}
        {{- end }}
        {{- end }}
        {{- with .http }}
        - {name: http, containerPort: {{ . }}, protocol: TCP}
        {{- end }}
        {{- with .root.Values.metrics.port }}
        - {name: metrics, containerPort: {{ . }}, protocol: TCP}
        {{- end }}
      env:
        {{- if eq .name "kvcache" }}
        # What a remote_url may name as $(K8S_POD_IP): where the clients of a Mooncake Store reach each other.
        - name: K8S_POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        # The data plane of this pod: a Service may lead to another one.
        - {name: FUSIONKV_KVCACHE_DATA_PORT, value: "7073"}
        - {name: FUSIONKV_KVCACHE_DATA_HOST, value: $(K8S_POD_IP)}
        {{- end }}
        - {name: FUSIONKV_{{ $section }}_LISTEN, value: "[::]:{{ .port }}{{ with .sockets }},unix:{{ . }}/kvcache.sock{{ end }}"}
        {{- with .http }}
        - {name: FUSIONKV_{{ $section }}_HTTP_LISTEN, value: "[::]:{{ . }}"}
        {{- end }}
        {{- if include "fusionkv.speaksTLS" . }}
        - {name: FUSIONKV_{{ $section }}_HEALTH_LISTEN, value: "[::]:7079"}
        {{- end }}
        {{- with .root.Values.metrics.port }}
        - {name: FUSIONKV_{{ $section }}_METRICS_LISTEN, value: "[::]:{{ . }}"}
        {{- end }}
        {{- range $key, $value := .env }}
        - {name: FUSIONKV_{{ $section }}_{{ upper $key }}, value: {{ $value | quote }}}
        {{- end }}
        {{- include "fusionkv.settings" . | nindent 8 }}
        {{- include "fusionkv.telemetry" .root | nindent 8 }}
        {{- with $values.extraEnv }}{{ toYaml . | nindent 8 }}{{ end }}
      startupProbe:
        {{- include "fusionkv.probe" . | nindent 8 }}
        periodSeconds: 2
        failureThreshold: {{ div .startup 2 }}
      readinessProbe:
        {{- include "fusionkv.probe" (merge (dict "service" .ready) .) | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 3
      livenessProbe:
        {{- include "fusionkv.probe" . | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 5
      {{- with $values.lifecycle }}
      lifecycle: {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        requests: {{- merge (dict) $values.resources.requests (.requests | default dict) | toYaml | nindent 10 }}
        limits: {{- merge (dict) $values.resources.limits (.limits | default dict) | toYaml | nindent 10 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- with .mounts }}{{ toYaml . | nindent 8 }}{{ end }}
        {{- include "fusionkv.secretMounts" . | nindent 8 }}
        {{- include "fusionkv.otlpMount" .root | nindent 8 }}
        {{- with $values.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
    {{- with $values.sidecars }}{{ toYaml . | nindent 4 }}{{ end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- with .volumes }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- include "fusionkv.secretVolumes" . | nindent 4 }}
    {{- include "fusionkv.otlpVolume" .root | nindent 4 }}
    {{- with $values.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end }}

{{/* Labels and annotations of pods: `root`, `name`, `values`. */}}
{{- define "fusionkv.podMetadata" -}}
metadata:
  labels:
    {{- include "fusionkv.selector" . | nindent 4 }}
    {{- with .values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with .values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* Where pods run: `root`, `name`, `values`. */}}
{{- define "fusionkv.scheduling" -}}
{{- $fields := pick .values "nodeSelector" "tolerations" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
{{- range $field, $value := $fields }}
{{- if $value }}
{{ toYaml (dict $field $value) }}
{{- end }}
{{- end }}
{{- if .values.affinity }}
affinity: {{- toYaml .values.affinity | nindent 2 }}
{{- else }}
# On different nodes, where there are some.
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "fusionkv.selector" . | nindent 14 }}
{{- end }}
{{- end }}

{{/* How a process logs, and where it sends traces and metrics: its environment, and the mount and volume for that. */}}
{{- define "fusionkv.telemetry" -}}
- {name: FUSIONKV_LOG, value: {{ .Values.log.level }}}
- {name: FUSIONKV_LOG_FORMAT, value: {{ .Values.log.format }}}
{{- with .Values.otlp }}{{ if .endpoint }}
- name: K8S_POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- {name: OTEL_RESOURCE_ATTRIBUTES, value: "service.instance.id=$(K8S_POD_NAME)"}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ .endpoint | quote }}}
{{- if lt (float64 .ratio) 1.0 }}
- {name: OTEL_TRACES_SAMPLER, value: parentbased_traceidratio}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ toString .ratio | quote }}}
{{- end }}
{{- with .headersSecret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom: {secretKeyRef: {name: {{ . }}, key: headers}}
{{- end }}
{{- if .caSecret }}
- {name: OTEL_EXPORTER_OTLP_CERTIFICATE, value: /etc/fusionkv-otlp/ca.crt}
{{- end }}
{{- end }}{{ end }}
{{- end }}

{{- define "fusionkv.otlpMount" -}}
{{- if and .Values.otlp.endpoint .Values.otlp.caSecret -}}
- {name: otlp, mountPath: /etc/fusionkv-otlp, readOnly: true}
{{- end }}
{{- end }}

{{- define "fusionkv.otlpVolume" -}}
{{- if and .Values.otlp.endpoint .Values.otlp.caSecret -}}
- name: otlp
  secret: {secretName: {{ .Values.otlp.caSecret }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* Kubernetes' gRPC probes can't speak TLS: a service with a certificate has a port for them. */}}
{{- define "fusionkv.probe" -}}
grpc: {port: {{ ternary 7079 .port (ne (include "fusionkv.speaksTLS" .) "") }}{{ with .service }}, service: {{ . }}{{ end }}}
{{- end }}

{{- define "fusionkv.ipFamilies" -}}
{{- with .Values.ipFamilyPolicy -}}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- end }}

{{/* Of several pods, one at a time may be moved; those that are not ready, at any time: `root`, `name`. */}}
{{- define "fusionkv.disruption" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {{- include "fusionkv.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "fusionkv.selector" . | nindent 6 }}
{{- end }}

{{/* How many pods an autoscaler has made, which an upgrade keeps: `root`, `name`, `kind`. Without a cluster, nothing. */}}
{{- define "fusionkv.scaled" -}}
{{- with lookup "apps/v1" .kind .root.Release.Namespace (include "fusionkv.fullname" .) -}}
replicas: {{ .spec.replicas }}
{{- end }}
{{- end }}

{{/* The service account of one component: no rights, no token. */}}
{{- define "fusionkv.account" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "fusionkv.metadata" . | nindent 2 }}
  {{- with (dig "serviceAccount" "annotations" dict (index .root.Values .name)) }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}

{{/* A claim's spec from `storage` values. */}}
{{- define "fusionkv.claim" -}}
accessModes: [{{ .accessMode | default "ReadWriteOnce" }}]
{{- with .className }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests: {storage: {{ .size }}}
{{- end }}

{{/* A claim that outlives the release, which `helm uninstall` would delete with what is in it: `root`, `name`, `storage`. */}}
{{- define "fusionkv.keptClaim" -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  {{- include "fusionkv.metadata" . | nindent 2 }}
  annotations: {helm.sh/resource-policy: keep}
spec: {{- include "fusionkv.claim" .storage | nindent 2 }}
{{- end }}

{{/* The volumes of a StatefulSet's pods, each its own: `root`, `name`, `storage`. */}}
{{- define "fusionkv.claimTemplates" -}}
- metadata:
    name: data
    labels: {{- include "fusionkv.selector" . | nindent 6 }}
  spec: {{- include "fusionkv.claim" .storage | nindent 4 }}
{{- end }}

{{/* Egress that every component needs: names, and the collector where there is one. */}}
{{- define "fusionkv.egress" -}}
# DNS: OpenShift's listens at 5353.
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}, {port: 5353, protocol: UDP}, {port: 5353, protocol: TCP}]
{{- with .root.Values.otlp.endpoint }}
{{ include "fusionkv.portEgress" (dict "url" . "usual" "4317") }}
{{- end }}
{{- with .root.Values.networkPolicy.egress }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Egress to the port of `url`, or to the `usual` one if it names none. */}}
{{- define "fusionkv.portEgress" -}}
{{- $host := (urlParse .url).host -}}
- ports: [{port: {{ regexMatch ":[0-9]+$" $host | ternary (splitList ":" $host | last) .usual }}, protocol: TCP}]
{{- end }}

{{/* The port of a cache service's KV events, if there is one; replays are at the next. */}}
{{- define "fusionkv.eventsPort" -}}
{{- regexFind "[0-9]+$" (regexFind "^tcp://.*" (.Values.kvcache.config.events_endpoint | default "")) }}
{{- end }}

{{/* What pods of jobs have in common: no rights, no token, tried again by the job alone; on nodes that gateways run on,
or that pods with `values` do. */}}
{{- define "fusionkv.jobPod" -}}
restartPolicy: Never
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $values := .values | default (pick .root.Values.gateway "nodeSelector" "tolerations" "priorityClassName") }}
{{- include "fusionkv.scheduling" (dict "root" .root "name" .name "values" $values) }}
{{- end }}

{{/* What pods of Redis, Mooncake Store, Milvus and vLLM have in common. */}}
{{- define "fusionkv.backendPod" -}}
serviceAccountName: {{ include "fusionkv.fullname" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- include "fusionkv.scheduling" (dict "root" .root "name" .name "values" (index .root.Values .name)) }}
{{- end }}

{{- define "fusionkv.jobContainer" -}}
image: {{ include "fusionkv.image" . }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext: {{- toYaml .root.Values.containerSecurityContext | nindent 2 }}
{{- end }}
