"""Puts the prebuilt kernels of one machine in the wheel (scripts/prebuild.py), and that machine in its tag."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "outrider/kernels/prebuilt"


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Without prebuilt kernels the wheel is the same for every machine."""
        machine = os.environ.get("OUTRIDER_WHEEL", "x86_64")
        if any(Path(self.root, FOLDER, machine).glob("*.so")):
            build_data["artifacts"].append(f"{FOLDER}/{machine}/*.so")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-manylinux_2_29_{machine}"
