"""A throw-away authority for one system on one machine: `specdec up --tls`. The openssl program makes it, so nothing is installed for it.

The folder holds ca.crt and a pair NAME.crt, NAME.key for each service and for clients. The authority's own key is gone when they are made:
nobody can sign more. Certificates are for loopback and for the name of whose they are.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from specdec.errors import InvalidRequest

CLIENT = "client"
NAMES = ("target", "draft", "orchestrator", CLIENT)
DAYS = "30"
OPENSSL_S = 30.0
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc")


def make(folder: Path) -> None:
    """Makes the folder anew. Raises InvalidRequest naming the flag."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    _openssl(folder, "req", "-x509", *_KEY, "-keyout", "ca.key", "-out", "ca.crt", "-days", DAYS, "-subj", "/CN=specdec up")
    for name in NAMES:
        _openssl(folder, "req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        extensions = folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:{name}\n")
        signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", DAYS, "-extfile", extensions.name)
        _openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signing)
        (folder / f"{name}.csr").unlink()
        extensions.unlink()
    (folder / "ca.key").unlink()


def serving(folder: Path, role: str) -> dict[str, str]:
    """SPECDEC_* settings, without the prefix, of a service that all callers have to show a certificate to. They all are one user, who may
    see the metrics."""
    settings = {"TLS_CERT": f"{folder / role}.crt", "TLS_KEY": f"{folder / role}.key", "TLS_CLIENT_CA": str(folder / "ca.crt")}
    if role != "orchestrator":
        return {**settings, "ALLOWED_IDENTITIES": "orchestrator"}
    own = {"TLS_CLIENT_CERT": settings["TLS_CERT"], "TLS_CLIENT_KEY": settings["TLS_KEY"]}
    return {**settings, **own, "TLS_CA": settings["TLS_CLIENT_CA"], "SHOW_METRICS": "true"}


def showing(folder: Path) -> dict[str, Path]:
    """What a client shows and asks for; nothing where no authority was made."""
    if not (folder / "ca.crt").is_file():
        return {}
    return {"tls_ca": folder / "ca.crt", "tls_cert": folder / f"{CLIENT}.crt", "tls_key": folder / f"{CLIENT}.key"}


def _openssl(folder: Path, *words: str) -> None:
    try:
        done = subprocess.run(("openssl", *words), cwd=folder, capture_output=True, text=True, timeout=OPENSSL_S, umask=0o077, check=False)
    except FileNotFoundError:
        raise InvalidRequest("--tls", "needs the openssl program (Debian: apt-get install openssl)") from None
    except subprocess.TimeoutExpired:
        raise InvalidRequest("--tls", f"openssl {words[0]} did not end in {OPENSSL_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise InvalidRequest("--tls", f"openssl {words[0]}: {last}")
