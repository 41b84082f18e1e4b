"""Ends a store from a pod of its cluster: asks the API server, by the rights that the pod's service account has."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from psstore.errors import AvailabilityError, BadArgument, NotAllowed

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

ANSWER_S = 30.0


def scale_to_zero(stateful_set: str, environ: Mapping[str, str], account: Path = ACCOUNT) -> bool:
    """False: there is no such set. Raises BadArgument where no cluster is, NotAllowed for lack of rights, and
    AvailabilityError."""
    try:
        namespace, token = ((account / name).read_text().strip() for name in ("namespace", "token"))
        trusted = ssl.create_default_context(cafile=account / "ca.crt")
        host, port = environ["KUBERNETES_SERVICE_HOST"], environ["KUBERNETES_SERVICE_PORT"]
    except (OSError, KeyError) as error:
        raise BadArgument(
            f"no pod with a service account ({error}); elsewhere: kubectl scale statefulset {stateful_set} --replicas 0"
        ) from None
    server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    request = Request(
        f"https://{server}/apis/apps/v1/namespaces/{namespace}/statefulsets/{stateful_set}/scale",
        method="PATCH",
        data=json.dumps({"spec": {"replicas": 0}}).encode(),
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"},
    )
    try:
        urlopen(request, timeout=ANSWER_S, context=trusted).close()
    except HTTPError as error:
        error.close()
        if error.code == 404:
            return False
        if error.code in (401, 403):
            raise NotAllowed(
                f"the API server refuses ({error.code}): the pod's service account needs the right to patch"
                f" statefulsets/scale of {stateful_set}"
            ) from None
        raise AvailabilityError(f"the API server answers {error.code} {error.reason}") from None
    except URLError as error:
        raise AvailabilityError(f"no API server at {server}: {error.reason}") from None
    except OSError as error:  # while its answer was read
        raise AvailabilityError(f"the API server at {server}: {error}") from None
    return True
