"""What an exported drafter needs to be served: the command, the manifests, the proof that the engine keeps what we keep."""

from __future__ import annotations
