{{/* Labels of what the chart makes itself. */}}
{{- define "octavo.labels" -}}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Labels by which pods are found. KubeRay has app.kubernetes.io/name for itself. */}}
{{- define "octavo.selector" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "octavo.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "octavo.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end }}

{{/* Of every Ray node. Why: k8s/base/rayservice.yaml. */}}
{{- define "octavo.environment" -}}
- name: RAY_health_check_initial_delay_ms
  value: "1000"
- name: RAY_health_check_period_ms
  value: "500"
- name: RAY_health_check_timeout_ms
  value: "1000"
- name: RAY_health_check_failure_threshold
  value: "3"
- name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  value: {{ .Values.termination.rayDrainSeconds | quote }}
- name: RAY_SERVE_ENABLE_HA_PROXY
  value: "1"
- name: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S
  value: "1"
- name: RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S
  value: "60"
- name: RAY_SERVE_HAPROXY_BALANCE_ALGORITHM
  value: "leastconn\n    no option splice-request\n    no option splice-response"
- name: RAY_SERVE_HAPROXY_LOG_TARGET
  value: "127.0.0.1:514 local0 info\n    tune.sndbuf.client 65536\n    tune.rcvbuf.server 65536\n    #"
- name: RAY_worker_niceness
  value: "0"
- name: RAY_ROTATION_MAX_BYTES
  value: "67108864"
- name: RAY_ROTATION_BACKUP_COUNT
  value: "3"
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: TOKENIZERS_PARALLELISM
  value: "false"
- name: OCTAVO_CACHE_DIR
  value: /var/cache/octavo
- name: HF_HOME
  value: /var/cache/octavo/huggingface
{{- with .Values.hubToken.secretName }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: {{ $.Values.hubToken.key }}, optional: true}
{{- end }}
{{- end }}

{{- define "octavo.startupAndLiveness" -}}
startupProbe:
  httpGet: {path: /api/local_raylet_healthz, port: 52365}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /api/local_raylet_healthz, port: 52365}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{- define "octavo.preStop" -}}
lifecycle:
  preStop:
    sleep:
      seconds: {{ .Values.termination.preStopSeconds }}
{{- end }}

{{- define "octavo.claimName" -}}
{{ .Values.cache.existingClaim | default (printf "%s-cache" .Release.Name) }}
{{- end }}

{{- define "octavo.redisAddress" -}}
{{ .Values.redis.address | default (printf "%s-redis:6379" .Release.Name) }}
{{- end }}

{{/* Where a path of the API is found. */}}
{{- define "octavo.route" -}}
{{ trimSuffix "/" .Values.serve.routePrefix }}
{{- end }}

{{/* Whether the number of any model's groups follows load: Serve then takes it from nobody else. Empty: no. */}}
{{- define "octavo.followsLoad" -}}
{{- range prepend (.Values.serve.args.models | default list) .Values.serve.args }}
{{- with .max_replicas }}yes{{ end }}
{{- end }}
{{- end }}

{{/* The Serve config. */}}
{{- define "octavo.serveConfig" -}}
{{- $args := deepCopy .Values.serve.args -}}
{{- if .Values.apiKeys.secretName }}{{ $_ := set $args "api_key_file" "/etc/octavo/api-keys" }}{{ end -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
applications:
  - name: octavo
    route_prefix: {{ .Values.serve.routePrefix }}
    import_path: octavo.cluster.application:build
    {{- if not (include "octavo.followsLoad" .) }}
    external_scaler_enabled: true
    {{- end }}
    args:
      {{- toYaml $args | nindent 6 }}
{{- end }}

{{/* What the schema cannot say: values that are fine alone and do not go together. */}}
{{- define "octavo.check" -}}
{{- $v := .Values }}
{{- $needed := add $v.termination.preStopSeconds $v.termination.rayDrainSeconds 10 }}
{{- if lt (int $v.termination.gracePeriodSeconds) (int $needed) }}
{{- fail (printf "termination.gracePeriodSeconds: must be at least preStopSeconds + rayDrainSeconds + 10 (%d), got %d" (int $needed) (int $v.termination.gracePeriodSeconds)) }}
{{- end }}
{{- if gt (int $v.workers.minReplicas) (int $v.workers.replicas) }}
{{- fail (printf "workers.minReplicas: must be at most workers.replicas (%d), got %d" (int $v.workers.replicas) (int $v.workers.minReplicas)) }}
{{- end }}
{{- if gt (int $v.workers.replicas) (int $v.workers.maxReplicas) }}
{{- fail (printf "workers.replicas: must be at most workers.maxReplicas (%d), got %d" (int $v.workers.maxReplicas) (int $v.workers.replicas)) }}
{{- end }}
{{- if and (eq $v.upgrade.strategy "NewClusterWithIncrementalUpgrade") (gt (int $v.upgrade.stepSizePercent) (int $v.upgrade.maxSurgePercent)) }}
{{- fail (printf "upgrade.stepSizePercent: must be at most upgrade.maxSurgePercent (%d), got %d" (int $v.upgrade.maxSurgePercent) (int $v.upgrade.stepSizePercent)) }}
{{- end }}
{{- if eq $v.serve.args.device "cuda" }}
{{- $ofReplica := mul $v.workers.hosts $v.workers.gpus }}
{{- $ranks := 0 }}
{{- $most := 0 }}
{{- range ($v.serve.args.models | default (list dict)) }}
{{- $size := int (.tensor_parallel_size | default $v.serve.args.tensor_parallel_size | default 1) }}
{{- if gt $size (int $ofReplica) }}
{{- fail (printf "serve.args.tensor_parallel_size: must be at most workers.hosts × workers.gpus (%d), got %d" (int $ofReplica) $size) }}
{{- end }}
{{- $groups := .replicas | default $v.serve.args.replicas | default 1 }}
{{- $ranks = add $ranks (mul $size $groups) }}
{{- $most = add $most (mul $size (.max_replicas | default $v.serve.args.max_replicas | default $groups)) }}
{{- end }}
{{- $gpus := mul $ofReplica $v.workers.replicas }}
{{- if gt (int $ranks) (int $gpus) }}
{{- fail (printf "serve.args.replicas: %d ranks in all need a GPU each, and workers have %d (replicas × hosts × gpus)" (int $ranks) (int $gpus)) }}
{{- end }}
{{- $mostGpus := mul $ofReplica $v.workers.maxReplicas }}
{{- if gt (int $most) (int $mostGpus) }}
{{- fail (printf "serve.args.max_replicas: %d ranks in all would need a GPU each, and workers have at most %d (maxReplicas × hosts × gpus)" (int $most) (int $mostGpus)) }}
{{- end }}
{{- end }}
{{- if gt (int $v.workers.hosts) 1 }}
{{- $pods := mul $v.workers.replicas $v.workers.hosts }}
{{- if ne (int ($v.serve.args.num_gateways | default 1)) (int $pods) }}
{{- fail (printf "serve.args.num_gateways: must be the number of worker pods (%d) where workers.hosts is above 1, as a pod without one is never ready; got %d" (int $pods) (int ($v.serve.args.num_gateways | default 1))) }}
{{- end }}
{{- if ne (int ($v.serve.args.max_gateways_per_node | default 0)) 1 }}
{{- fail "serve.args.max_gateways_per_node: must be 1 where workers.hosts is above 1, so that each pod has a gateway" }}
{{- end }}
{{- if ne ($v.serve.args.placement | default "node") "nodes" }}
{{- fail (printf "serve.args.placement: must be nodes where workers.hosts is above 1, got %s" ($v.serve.args.placement | default "node")) }}
{{- end }}
{{- end }}
{{- if gt (len .Release.Name) 36 }}
{{- fail (printf "the release's name may have 36 characters, as KubeRay makes longer ones of it; %s has %d" .Release.Name (len .Release.Name)) }}
{{- end }}
{{- end }}
