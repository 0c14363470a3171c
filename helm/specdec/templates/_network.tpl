{{/*
Rules of the network policies. Ports are those of pods: a policy is asked behind Services. All take the root unless they say otherwise.
*/}}

{{/* Pods of a component of this release, as one peer. Takes dict "root" $ "component" c. */}}
{{- define "specdec.peer" -}}
- podSelector:
    matchLabels:
      {{- include "specdec.selectorLabels" . | nindent 6 }}
{{- end -}}

{{/* Ports of a rule. Takes a list of numbers; all TCP. */}}
{{- define "specdec.tcp" -}}
{{- range $place, $port := . -}}
{{- if $place }}{{ "\n" }}{{ end -}}
- port: {{ $port }}
  protocol: TCP
{{- end -}}
{{- end -}}

{{/* Names are looked up. */}}
{{- define "specdec.egressDns" -}}
- to:
    {{- toYaml .Values.networkPolicy.egress.dns | nindent 4 }}
  ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- end -}}

{{/* The collector of spans. A name of one or two parts is a Service's; for others only the port is known. */}}
{{- define "specdec.egressTelemetry" -}}
{{- with .Values.telemetry.otlpEndpoint -}}
- ports:
    {{- include "specdec.tcp" (list (include "specdec.portOf" .)) | nindent 4 }}
  {{- with include "specdec.namespaceOf" (dict "host" (include "specdec.hostOf" .) "own" $.Release.Namespace) }}
  to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ . | quote }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* Of a URL. Take the URL. */}}
{{- define "specdec.hostOf" -}}
{{- regexReplaceAll ":[0-9]+$" (urlParse .).host "" -}}
{{- end -}}
{{- define "specdec.portOf" -}}
{{- $url := urlParse . -}}
{{- trimPrefix ":" (regexFind ":[0-9]+$" $url.host) | default (ternary "80" "443" (eq $url.scheme "http")) -}}
{{- end -}}

{{/* The namespace of a Service's name (name, name.namespace, name.namespace.svc…); nothing for other hosts. Takes dict "host" "own". */}}
{{- define "specdec.namespaceOf" -}}
{{- $parts := splitList "." .host -}}
{{- if eq (len $parts) 1 -}}
{{-   if not (contains ":" .host) -}}{{ .own }}{{- end -}}
{{- else if or (eq (len $parts) 2) (eq (index $parts 2) "svc") -}}
{{-   index $parts 1 -}}
{{- end -}}
{{- end -}}

{{/* Replicas that this release does not run: entries as SPECDEC_TARGETS takes them. Takes dict "root" $ "entries" list. */}}
{{- define "specdec.egressEntries" -}}
{{- $own := .root.Release.Namespace -}}
{{- range .entries -}}
{{- $address := last (splitList "=" .) -}}
{{- $port := last (splitList ":" $address) -}}
{{- if hasPrefix "kubernetes://" $address }}
{{- $namespace := first (splitList "/" (trimPrefix "kubernetes://" $address)) | default $own }}
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ $namespace | quote }}
  {{- if regexMatch "^[0-9]+$" $port }}
  ports:
    {{- include "specdec.tcp" (list $port) | nindent 4 }}
  {{- end }}
{{- else }}
{{- /* Where the name leads is unknown here. */}}
- ports:
    {{- include "specdec.tcp" (list $port) | nindent 4 }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* "true" where orchestrators watch EndpointSlices. */}}
{{- define "specdec.watches" -}}
{{- $more := concat (.Values.discovery.extraTargets | default list) (.Values.discovery.extraDrafts | default list) -}}
{{- if or (eq .Values.discovery.type "kubernetes") (contains "kubernetes://" (join "," $more)) -}}true{{- end -}}
{{- end -}}

{{/* Hubs from which some workload of a component downloads its model, as JSON: endpoints, "" = the hub itself. Takes dict "root" "component". */}}
{{- define "specdec.hubs" -}}
{{- $found := list -}}
{{- $root := .root -}}
{{- $component := .component -}}
{{- if eq $component "orchestrator" -}}
{{-   $found = append $found (include "specdec.model" (dict "root" $root "component" $component "values" $root.Values.orchestrator) | fromJson) -}}
{{- else -}}
{{-   range include "specdec.pools" . | fromJson -}}{{- $found = append $found .model -}}{{- end -}}
{{- end -}}
{{- $hubs := list -}}
{{- range $found -}}
{{-   if eq .source "hf" -}}{{- $hubs = append $hubs (.hf.endpoint | default "") -}}{{- end -}}
{{- end -}}
{{- $hubs | uniq | toJson -}}
{{- end -}}

{{/* The hub of models, or a mirror of it. Takes dict "root" $ "component" c. */}}
{{- define "specdec.egressHubs" -}}
{{- $root := .root -}}
{{- range include "specdec.hubs" . | fromJsonArray }}
{{- $host := include "specdec.hostOf" (. | default "https://hub") }}
{{- $namespace := "" }}
{{- if . }}{{- $namespace = include "specdec.namespaceOf" (dict "host" $host "own" $root.Release.Namespace) }}{{- end }}
- ports:
    {{- include "specdec.tcp" (list (include "specdec.portOf" (. | default "https://hub"))) | nindent 4 }}
  to:
    {{- if $namespace }}
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ $namespace | quote }}
    {{- else }}
    {{- toYaml $root.Values.networkPolicy.egress.hub | nindent 4 }}
    {{- end }}
{{- end }}
{{- end -}}

{{/* Who may call a component's gRPC port, with the port. Takes dict "root" $ "component" c. */}}
{{- define "specdec.ingressCalls" -}}
{{- $policy := .root.Values.networkPolicy -}}
{{- $port := include "specdec.port" .component -}}
- ports:
    {{- include "specdec.tcp" (list $port) | nindent 4 }}
  {{- if ne .component "orchestrator" }}
  from:
    {{- include "specdec.peer" (dict "root" .root "component" "orchestrator") | nindent 4 }}
    {{- with $policy.orchestrators }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- else if $policy.clients }}
  from:
    {{- toYaml $policy.clients | nindent 4 }}
    {{- if .root.Values.tests.enabled }}
    {{- include "specdec.peer" (dict "root" .root "component" "test") | nindent 4 }}
    {{- end }}
  {{- end }}
{{- end -}}

{{/* Takes dict "root" $ "component" c. */}}
{{- define "specdec.ingress" -}}
{{- $policy := .root.Values.networkPolicy -}}
{{- $front := eq .component "orchestrator" -}}
{{ include "specdec.ingressCalls" . }}
{{- with $policy.metrics }}
- ports:
    {{- include "specdec.tcp" (list (include "specdec.port" "metrics")) | nindent 4 }}
  from:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- /* The kubelet of a pod's own node gets through whatever a policy says; helm test asks for health where it may not call. */}}
{{- $asks := $policy.health | default list }}
{{- if and $front .root.Values.tests.enabled }}
{{- $asks = concat $asks (include "specdec.peer" (dict "root" .root "component" "test") | fromYamlArray) }}
{{- end }}
{{- with $asks }}
- ports:
    {{- include "specdec.tcp" (list (include "specdec.port" "health")) | nindent 4 }}
  from:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- if and $front (include "specdec.externalScaler" .root) }}
- ports:
    {{- include "specdec.tcp" (list (include "specdec.port" "scaler")) | nindent 4 }}
  from:
    {{- include "specdec.peer" . | nindent 4 }}
    {{- with $policy.scaler }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end -}}

{{/* Takes dict "root" $ "component" c. */}}
{{- define "specdec.egress" -}}
{{- $root := .root -}}
{{ include "specdec.egressDns" $root }}
{{- if eq .component "orchestrator" }}
{{- range $component := list "target" "draft" }}
- to:
    {{- include "specdec.peer" (dict "root" $root "component" $component) | nindent 4 }}
  ports:
    {{- include "specdec.tcp" (list (include "specdec.port" $component)) | nindent 4 }}
{{- end }}
{{- $more := concat ($root.Values.discovery.extraTargets | default list) ($root.Values.discovery.extraDrafts | default list) }}
{{- include "specdec.egressEntries" (dict "root" $root "entries" $more) }}
{{- if include "specdec.externalScaler" $root }}
- to:
    {{- include "specdec.peer" . | nindent 4 }}
  ports:
    {{- include "specdec.tcp" (list (include "specdec.port" "scaler")) | nindent 4 }}
{{- end }}
{{- if include "specdec.watches" $root }}
- to:
    {{- toYaml $root.Values.networkPolicy.egress.apiServer | nindent 4 }}
  ports:
    {{- include "specdec.tcp" (list 443 6443) | nindent 4 }}
{{- end }}
{{- end }}
{{- with include "specdec.egressTelemetry" $root }}
{{ . }}
{{- end }}
{{- include "specdec.egressHubs" . }}
{{- with $root.Values.networkPolicy.egress.allow }}
{{ toYaml . }}
{{- end }}
{{- end -}}
