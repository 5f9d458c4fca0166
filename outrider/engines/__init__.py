"""What is needed to serve an exported drafter: the command, the manifests, and a check that the engine accepts as many
tokens as Outrider does."""

from __future__ import annotations
