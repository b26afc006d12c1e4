"""A list of devices in an environment variable ends at the first invalid entry."""

from __future__ import annotations

import pytest

from interposer_ops.devices.visible_devices import read_device_list, require_index


def find(entry: str) -> int:
    require_index(int(entry), 3)
    return int(entry)


@pytest.mark.parametrize(
    ("text", "devices", "note"),
    [
        ("2,0", (2, 0), "ACME_DEVICES=2,0"),
        (" ", (), "ACME_DEVICES is empty, which hides every GPU"),
        (
            "1,3,0",
            (1,),
            "ACME_DEVICES=1,3,0: there is no GPU 3, the last is 2, "
            "and entries from there on are ignored",
        ),
    ],
)
def test_a_list_ends_at_an_invalid_entry(text: str, devices: tuple[int, ...], note: str) -> None:
    visible = read_device_list("ACME_DEVICES", text, find)
    assert (visible.devices, visible.note) == (devices, note)


def test_a_machine_without_gpus_has_no_index() -> None:
    with pytest.raises(ValueError, match="there is no GPU 0, there are none"):
        require_index(0, 0)
