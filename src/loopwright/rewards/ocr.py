"""How well a picture's text can be read as the text asked for, from 0 to 1.

    score = OCR()
    score([Sample('the word "lamp" on a red background', frames)])      # [0.98]

The default measure is "ctc": the likelihood that the recogniser gives the wanted text over all its alignments, as the
mean a letter, exp(log p / length). It is smooth, so that a group of samples of which none can be read yet still has a
best one, and a letter that is almost right counts. "edit" is 1 - edit distance / length of the longer text, which
changes in steps; it says how much of the text a reader would get, and is the one to report.

Upper and lower case count as one, and spaces do not count. Of a video the best of some frames counts, since a word may
grow, shrink or turn in it. Source of the likelihood: Graves et al., Connectionist Temporal Classification (2006).
Deliberately absent: another reader for evaluation, which is `judge`.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..errors import RequestError
from .facts import text
from .pictures import Picture, spread
from .recogniser import BLANK, Probabilities, Recogniser
from .reward import Sample

MEASURES = ("ctc", "edit")
_LEAST = 1e-30  # a probability that is none, to float32


class OCR:
    """A reward: `frames` of each sample are read, evenly spaced, and the best of them counts.

    In bfloat16 likelihoods differ by thousandths, those of hardly legible texts by hundredths.

    Raises RequestError for a prompt without a text, or with a sign that the recogniser does not know.
    """

    def __init__(self, measure: str = "ctc", frames: int = 3, threads: int = 1, precision: str = "float32") -> None:
        if measure not in MEASURES:
            raise RequestError("unknown measure of text", value=measure, choices=MEASURES)
        if frames < 1:
            raise RequestError("at least one frame must be read", value=frames, remedy="give 1 or more")
        self._measure, self._frames, self._recogniser = measure, frames, Recogniser(threads, precision)

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """A score a sample; 0 where nothing stands out."""
        wanted = self.wanted(samples)
        shown = [(place, picture) for place, s in enumerate(samples) for picture in spread(s, self._frames)]
        scores = [0.0] * len(samples)
        pictures, texts = [picture for _, picture in shown], [wanted[place] for place, _ in shown]
        found = self._likelihoods(pictures, texts) if self._measure == "ctc" else self._edits(pictures, texts)
        for (place, _), score in zip(shown, found, strict=True):
            scores[place] = max(scores[place], score)
        return scores

    @staticmethod
    def wanted(samples: Sequence[Sample]) -> list[str]:
        """The texts asked for, in lower case and without spaces. Raises RequestError."""
        return [plain(text(sample)) for sample in samples]

    def _edits(self, pictures: Sequence[Picture], texts: Sequence[str]) -> list[float]:
        seen = [plain(said) for said in self._recogniser.read(pictures)]
        return [similarity(said, wanted) for said, wanted in zip(seen, texts, strict=True)]

    def _likelihoods(self, pictures: Sequence[Picture], texts: Sequence[str]) -> list[float]:
        signs, scores = [self._signs(wanted) for wanted in texts], [0.0] * len(pictures)
        for places, probabilities in self._recogniser.batches(pictures):
            for place, score in zip(places, likelihoods(probabilities, [signs[p] for p in places]), strict=True):
                scores[place] = score
        return scores

    def _signs(self, wanted: str) -> list[list[int]]:
        """For every letter of the text what the recogniser may call it; first of all what counts as no letter."""
        letters = self._recogniser.letters
        known = [[letters[form] for form in {letter, letter.upper()} if form in letters] for letter in wanted]
        if unknown := [letter for letter, forms in zip(wanted, known, strict=True) if not forms]:
            raise RequestError("the recogniser knows no such sign", value=unknown[0], remedy="leave it out of the text")
        return [[BLANK, letters[" "]], *known]


def likelihoods(probabilities: Probabilities, signs: Sequence[Sequence[Sequence[int]]]) -> list[float]:
    """exp(log p / length) of each row of probabilities [N, columns, letters], for texts as lists of letters' numbers.

    A text's first entry are the numbers that count as blank. 0 for a text longer than there are columns.
    """
    rows, columns, _ = probabilities.shape
    # columns of the text's own letters alone, each letter of it a class: the alphabet has thousands that play no part
    own = np.zeros((rows, columns, max(map(len, signs))), np.float32)
    for row, source, letters in zip(own, probabilities, signs, strict=True):
        for number, forms in enumerate(letters):
            row[:, number] = source[:, forms].sum(axis=-1)
    classes = [_classes(letters) for letters in signs]
    lengths = torch.tensor([len(each) for each in classes])
    log = torch.from_numpy(own).clamp_min(_LEAST).log().transpose(0, 1)
    given = torch.full((rows,), columns)
    loss = torch.nn.functional.ctc_loss(log, torch.cat(classes), given, lengths, blank=0, reduction="none")
    scores: list[float] = (-loss / lengths).exp().clamp(max=1.0).tolist()
    return scores


def _classes(letters: Sequence[Sequence[int]]) -> torch.Tensor:
    """Which class each letter of a text is: that of its first occurrence, since CTC merges what is repeated."""
    return torch.tensor([letters.index(forms, 1) for forms in letters[1:]])


def similarity(said: str, wanted: str) -> float:
    """1 - edit distance / the longer text's length."""
    row = list(range(len(wanted) + 1))
    for i, a in enumerate(said, start=1):
        before, row[0] = row[0], i
        for j, b in enumerate(wanted, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return 1.0 - row[-1] / max(len(said), len(wanted), 1)


def plain(said: str) -> str:
    """In lower case and without spaces."""
    return "".join(said.lower().split())
