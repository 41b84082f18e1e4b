{{/* What the pods of shards and workers have in common; python/psstore/launch/kubernetes/pods.py says the same. */}}

{{- define "psstore.check" -}}
{{- $longest := printf "%s-workers-worker-0-%d-abcde" .Release.Name (sub (include "psstore.most" . | int) 1) -}}
{{- if or (gt (len $longest) 63) (not (regexMatch "^[a-z]" .Release.Name)) -}}
{{- fail (printf "the release's name is %q; expected at most %d characters, a letter first" .Release.Name (sub 63 (sub (len $longest) (len .Release.Name)))) -}}
{{- end -}}
{{- end }}

{{- define "psstore.labels" -}}
app.kubernetes.io/name: psstore
app.kubernetes.io/instance: {{ .root.Release.Name }}
psstore/part: {{ .part }}
{{- end }}

{{- define "psstore.most" -}}
{{ .Values.workers | toString | splitList ":" | last }}
{{- end }}

{{/* Host and port of the pods from one number on up to another. */}}
{{- define "psstore.places" -}}
{{- $name := .root.Release.Name -}}
{{- $places := list -}}
{{- range $pod := untilStep (int .from) (int .to) 1 -}}
{{- $places = append $places (printf "%s-%d.%s:5700" $name $pod $name) -}}
{{- end -}}
{{ join "," $places }}
{{- end }}

{{- define "psstore.url" -}}
{{- $first := include "psstore.places" (dict "root" . "from" 0 "to" 1) -}}
{{- $standby := include "psstore.places" (dict "root" . "from" .Values.shards "to" (add1 .Values.shards)) -}}
{{ if .Values.tlsSecret }}pss{{ else }}ps{{ end }}://{{ $first }}{{ if .Values.standbys }},{{ $standby }}{{ end }}
{{- end }}

{{- define "psstore.save" -}}
["psstore", "checkpoint", "save", {{ include "psstore.url" . | quote }}, "--wait", {{ mulf 0.8 .Values.graceSeconds | toString | quote }}]
{{- end }}

{{- define "psstore.pod" -}}
terminationGracePeriodSeconds: {{ .Values.graceSeconds }}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "psstore.container" -}}
image: {{ .Values.image | quote }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "psstore.mounts" -}}
- {name: secrets, mountPath: /run/psstore, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "psstore.small" -}}
requests: {memory: 256Mi, cpu: 100m}
limits: {memory: 256Mi}
{{- end }}

{{- define "psstore.envFrom" -}}
{{- if .Values.envSecrets -}}
envFrom:
{{- range .Values.envSecrets }}
  - secretRef: {name: {{ . | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "psstore.certificate" -}}
- {name: PSSTORE_TLS_CERT, value: /run/psstore/tls.crt}
- {name: PSSTORE_TLS_KEY, value: /run/psstore/tls.key}
{{- end }}

{{/* How a pod connects to the store, which is no part of it. */}}
{{- define "psstore.client" -}}
- {name: PSSTORE_URL, value: {{ include "psstore.url" . | quote }}}
- {name: PSSTORE_TOKEN_FILE, value: /run/psstore/token}
{{- if .Values.tlsSecret }}
- {name: PSSTORE_TLS_CA, value: /run/psstore/ca.crt}
{{- end }}
{{- if .Values.tlsClientSecret }}
{{ include "psstore.certificate" . }}
{{- end }}
{{- end }}

{{/* The secrets with the pod's token, with the workers' where it is the store's, and with its own certificate. */}}
{{- define "psstore.volumes" -}}
- name: secrets
  projected:
    defaultMode: 0440
    sources:
      - secret:
          name: {{ .token | quote }}
          items: [{key: token, path: token}]
{{- if .workerToken }}
      - secret:
          name: {{ .workerToken | quote }}
          items: [{key: token, path: worker-token}]
{{- end }}
{{- if .root.Values.tlsSecret }}
      - secret:
          name: {{ .root.Values.tlsSecret | quote }}
          items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- if .own }}
      - secret:
          name: {{ .own | quote }}
          items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
{{- end }}
- {name: tmp, emptyDir: {}}
{{- end }}
