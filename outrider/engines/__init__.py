"""What an exported drafter needs to be served: the command, the manifests, the check that the engine accepts what we
accept."""

from __future__ import annotations
