"""Sounds of spoken digits, to train and to test a small speech model.

The program espeak-ng speaks: Debian has it as the package espeak-ng. Its voices, speeds and pitches
of the held-out groups are never trained on.

Dimensions: S samples.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import wave
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SOUNDS = Path(__file__).parent / "sounds"
RATE = 16_000
"""Samples per second of all sounds."""
WINDOW_SECONDS = 3
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_ESPEAK_RATE, _HEADER_BYTES = 22_050, 44
# Samples below this share of the loudest one are silence before and after the digits.
_SILENCE = 0.02


@dataclass(frozen=True)
class Voices:
    """A group of voices: each utterance draws accent, variant, speed and pitch.

    Attributes:
        accents: English voices of espeak-ng.
        variants: Speakers, which espeak-ng combines with any accent.
        speeds: Words per minute.
        pitches: From 0 to 99; espeak-ng's default is 50.
    """

    accents: tuple[str, ...]
    variants: tuple[str, ...]
    speeds: tuple[int, ...]
    pitches: tuple[int, ...]


_ACCENTS = ("en-us", "en-gb", "en-gb-x-rp", "en-gb-x-gbclan", "en-029")
_VARIANTS = (
    *("f1", "f2", "f3", "f5", "m1", "m2", "m3", "m4", "m5", "m6", "m8"),
    *("Andrea", "Annie", "Denis", "Diogo", "Gene", "Hugo", "Jacky", "Lee", "Marco", "Mike"),
    *("adam", "anika", "antonio", "belinda", "boris", "david", "edward", "iven", "john", "linda"),
    *("marcelo", "max", "pablo", "pedro", "quincy", "robert", "sandro", "shelby", "steph", "zac"),
)
_SPEEDS, _PITCHES = tuple(range(130, 201)), tuple(range(25, 76))
TRAINING = Voices(_ACCENTS, _VARIANTS, _SPEEDS, _PITCHES)
_NEW_VARIANTS = ("f4", "m7", "Alicia", "Mario", "miguel", "steph2")
HELD_OUT = {
    "new sentences": TRAINING,
    "new speakers": Voices(_ACCENTS, _NEW_VARIANTS, _SPEEDS, _PITCHES),
    "new accents": Voices(("en-gb-scotland", "en-us-nyc"), _VARIANTS, _SPEEDS, _PITCHES),
    "slower and faster": Voices(_ACCENTS, _VARIANTS, (115, 120, 210, 215), _PITCHES),
    "lower and higher": Voices(_ACCENTS, _VARIANTS, _SPEEDS, (5, 15, 85, 95)),
    "all of these": Voices(
        ("en-gb-scotland", "en-us-nyc"), _NEW_VARIANTS, (120, 210), (5, 15, 85, 95)
    ),
}
"""Groups that are never trained on; the first one only by the order of its digits."""


@dataclass(frozen=True)
class Utterance:
    """Some digits in a sound without silence before and after.

    Attributes:
        samples: ``[S]`` float32, at most 1.
    """

    digits: str
    samples: Tensor


def speak(voices: Voices, seed: str) -> Utterance:
    """Return one to three digits, spoken by a voice of a group; equal arguments, equal samples."""
    chance = random.Random(seed)
    digits = "".join(chance.choices("0123456789", k=chance.randint(1, 3)))
    command = [
        *("espeak-ng", "--stdout"),
        *("-v", f"{chance.choice(voices.accents)}+{chance.choice(voices.variants)}"),
        *("-s", str(chance.choice(voices.speeds)), "-p", str(chance.choice(voices.pitches))),
        " ".join(WORDS[int(digit)] for digit in digits),
    ]
    content = subprocess.run(command, check=True, capture_output=True).stdout
    stored = torch.frombuffer(bytearray(content[_HEADER_BYTES:]), dtype=torch.int16)
    samples = stretch(stored.to(torch.float32) / 2**15, RATE / _ESPEAK_RATE)
    loud = (samples.abs() > _SILENCE * samples.abs().max()).nonzero()
    return Utterance(digits, samples[int(loud[0]) : int(loud[-1]) + 1].clone())


def speak_all(voices: Voices, seeds: Iterable[str]) -> list[Utterance]:
    """Return an utterance for each seed; several programs run at the same time."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda seed: speak(voices, seed), seeds))


def stretch(samples: Tensor, factor: float) -> Tensor:
    """Return a sound with ``factor`` times as many samples, by its spectrum.

    At an unchanged rate, the sound is slower and lower, or faster and higher.
    """
    length = round(factor * len(samples))
    spectrum = torch.fft.rfft(samples)[: length // 2 + 1]
    stretched: Tensor = torch.fft.irfft(spectrum, length) * factor
    return stretched


def write_wav(file: Path, samples: Tensor) -> None:
    """Write a small file: 8,000 samples per second of 8 bits."""
    halved = stretch(samples, 0.5)
    levels = (halved / halved.abs().max() * 120 + 128).round().to(torch.uint8)
    with wave.open(str(file), "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(1)
        writer.setframerate(RATE // 2)
        writer.writeframes(levels.numpy().tobytes())


def main() -> None:
    """Write a sound of each held-out group; the name of a file is the digits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=SOUNDS)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for group, voices in HELD_OUT.items():
        utterance = speak(voices, f"example of {group}")
        write_wav(folder / f"{utterance.digits}.wav", utterance.samples)
        print(group, utterance.digits, f"{len(utterance.samples) / RATE:.2f} s")


if __name__ == "__main__":
    main()
