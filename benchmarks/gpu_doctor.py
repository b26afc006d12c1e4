"""Say what is installed on a machine with an accelerator, and what doctor says of it.

python benchmarks/gpu_doctor.py [--platform NAME] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform as machine
from collections.abc import Iterator

import torch
from packaging.requirements import Requirement

from evidence.record import Record, add_step_options
from gpu_clock import placement_of
from interposer import Config, current_registry
from interposer_testing.described import DeviceDescription
from interposer_tools import doctor

_PACKAGES = ("torch", "triton", "transformers", "pydantic", "pytest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_step_options(parser)
    options = parser.parse_args()
    record = Record(options.json)
    record.facts["versions"] = versions = {"python": machine.python_version(), **dict(_versions())}
    record.say(", ".join(f"{name} {version}" for name, version in versions.items()))
    for text in _unmet():
        record.fault(text)
    health = doctor(Config(platform=options.platform) if options.platform else None)
    record.facts["health"] = health.to_dict()
    record.say(str(health))
    for problem in health.problems:
        record.fault(f"{problem.subject}: {problem.reason}")
    placement = placement_of(options.platform, options.tiny)
    device = placement.device
    description = json.loads(DeviceDescription.of(placement).to_json())
    record.facts |= {"device": device.name, "description": description}
    memory = placement.platform.memory(device.torch_device)
    record.headline = (
        f"{device.name} ({device.capability.architecture}), {memory.free_bytes / 2**30:.0f} GiB "
        f"free, torch {torch.__version__}; {len(health.plugins)} plugins, "
        f"{len(health.problems)} problems"
    )
    record.say(record.headline)


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "missing"


def _unmet() -> Iterator[str]:
    """Yield a description of each of our requirements that this Python does not meet."""
    names = {plugin.distribution for plugin in current_registry().plugins.loaded}
    for name in sorted({*names, "interposer", "interposer-testing", "interposer-tools"}):
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                yield f"{name} requires {requirement}, which is missing"
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                yield f"{name} requires {requirement}, here is {version}"


if __name__ == "__main__":
    main()
