{{/*
Where files of a model come from: a volume, its mount, and for `hf` a container that downloads them first.
*/}}

{{/* Folder that every source is mounted at. */}}
{{- define "specdec.modelFolder" -}}/model{{- end -}}

{{/*
The model values that count for a workload, as JSON: a pool's own, and for the orchestrator its tokenizer or, without a source of its
own, the files of target.model that a tokenizer needs. Takes dict "root" $ "component" c "values" v.
*/}}
{{- define "specdec.model" -}}
{{- if ne .component "orchestrator" -}}
{{-   .values.model | toJson -}}
{{- else if .values.tokenizer.source -}}
{{-   .values.tokenizer | toJson -}}
{{- else -}}
{{-   $model := deepCopy .root.Values.target.model -}}
{{-   $_ := set $model.hf "allowPatterns" .values.tokenizer.hf.allowPatterns -}}
{{-   $_ := set $model.hf "volume" .values.tokenizer.hf.volume -}}
{{-   $_ := set $model.hf "resources" .values.tokenizer.hf.resources -}}
{{-   $model | toJson -}}
{{- end -}}
{{- end -}}

{{/* The folder with the files, as the service is told. Takes a model. */}}
{{- define "specdec.modelPath" -}}
{{- list (include "specdec.modelFolder" .) .path | compact | join "/" -}}
{{- end -}}

{{/* Takes a model. */}}
{{- define "specdec.modelVolume" -}}
- name: model
{{- if eq .source "pvc" }}
  persistentVolumeClaim:
    claimName: {{ .pvc.claimName | quote }}
    readOnly: true
{{- else if eq .source "hostPath" }}
  hostPath:
    path: {{ .hostPath.path | quote }}
    type: Directory
{{- else if eq .source "image" }}
  image:
    reference: {{ .image.reference | quote }}
    pullPolicy: {{ .image.pullPolicy }}
{{- else if .hf.volume }}
  {{- toYaml .hf.volume | nindent 2 }}
{{- else }}
  emptyDir: {}
{{- end }}
{{- end -}}

{{/*
The container that downloads. An interrupted download is resumed after its restart: files stay in the volume as long as the pod.
Takes dict "root" $ "component" c "values" v "model" m.
*/}}
{{- define "specdec.modelDownload" -}}
- name: download
  image: {{ include "specdec.image" (dict "root" .root "component" .component "image" .values.image) }}
  imagePullPolicy: {{ include "specdec.imagePullPolicy" (dict "root" .root "component" .component "image" .values.image) }}
  command:
    - python
    - -c
    - |
      import sys
      from huggingface_hub import snapshot_download
      repository, revision, folder, *patterns = sys.argv[1:]
      snapshot_download(repository, revision=revision or None, local_dir=folder, allow_patterns=patterns or None)
  args:
    - {{ .model.hf.repository | quote }}
    - {{ .model.hf.revision | quote }}
    - {{ include "specdec.modelFolder" . }}
    {{- range .model.hf.allowPatterns }}
    - {{ . | quote }}
    {{- end }}
  env:
    {{- /* Beside the files: whatever the client keeps is bounded by that volume, not by /tmp. */}}
    - name: HF_HOME
      value: {{ include "specdec.modelFolder" . }}/.cache
    - name: HF_HUB_DISABLE_TELEMETRY
      value: "1"
    {{- with .model.hf.endpoint }}
    - name: HF_ENDPOINT
      value: {{ . | quote }}
    {{- end }}
    {{- if .model.hf.existingSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ .model.hf.existingSecret | quote }}
          key: {{ .model.hf.existingSecretKey | quote }}
    {{- end }}
    {{- with .model.hf.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    {{- toYaml (.model.hf.resources | default .values.resources) | nindent 4 }}
  securityContext:
    {{- toYaml .root.Values.containerSecurityContext | nindent 4 }}
  volumeMounts:
    - name: model
      mountPath: {{ include "specdec.modelFolder" . }}
    - name: tmp
      mountPath: /tmp
    {{- with .model.hf.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
