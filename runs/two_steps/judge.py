"""What a run has changed, by judges of both kinds: the model before and after, on the run's held-out prompts.

    python runs/two_steps/judge.py runs/two_steps/words.yaml --judges tesseract

Samples are the same in every way but the adapter: seeds, steps, guidance. Told are the means of the run's own rewards,
of judges that it never trained on, and how far samples of one prompt lie apart; all of it also for the model as it is
meant to be used, in the card's number of steps. With --adapters those of earlier epochs are judged instead of the run's
last (adapters.py writes them). The run's output gets `judged.json` and `judged.png`: a row a prompt, before and after
(the last of them) beside each other.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import loopwright
from loopwright import media
from loopwright.rewards import Composite, Sample, judges, parse
from loopwright.training.held_out import diversity
from loopwright.training.prompts import Prompt, read
from loopwright.training.rollouts import chunks
from loopwright.training.run import Run
from loopwright.training.run import read as read_run

ROWS, COLUMNS = 8, 4  # of the sheet
USUAL = ("num_inference_steps", "guidance_scale", "negative_prompt")  # what the card says better


def made(model: loopwright.Model, prompts: Sequence[Prompt], draws: int, parameters: dict[str, object]) -> list[Sample]:
    """So many samples of each prompt, one prompt after the other."""
    asked = [prompt for prompt in prompts for _ in range(draws)]
    requests = [model.request(p.text, **parameters, seed=i, mode="throughput") for i, p in enumerate(asked)]
    found = {result.request.seed: result.video for result in model.run_all(requests)}
    return [Sample(p.text, torch.from_numpy(np.array(found[i])), p.facts) for i, p in enumerate(asked)]


def measured(samples: Sequence[Sample], scorers: Sequence[Composite], draws: int) -> dict[str, float]:
    """Each scorer's mean by its name, and the diversity."""
    found: dict[str, float] = {}
    for scorer in scorers:
        for name, scores in scorer.parts(samples).items():
            known = [score for score in scores if score is not None]
            found[name] = sum(known) / len(known)
    apart = [diversity(group) for group in chunks(samples, draws)]
    return found | {"diversity": sum(apart) / len(apart)}


def sheet(groups: Sequence[Sequence[Sample]], draws: int) -> np.ndarray:
    """A row a prompt: the frames in the middle of the first samples, before and then after."""
    middle = [sample.frames[len(sample.frames) // 2].numpy() for row in groups for sample in row]
    return media.contact_sheet(np.stack(middle), columns=2 * min(draws, COLUMNS))


def adapter_of(run: Run) -> Path:
    """What the run wrote."""
    (found,) = (Path(run.output) / "lora").glob("*.safetensors")
    return found


def compare(run: Run, scorers: Sequence[Composite], draws: int, adapters: Sequence[Path]) -> None:
    """Print and write what all scorers say."""
    assert run.rollout is not None and run.rollout.held_out is not None
    prompts, given = read(run.rollout.held_out), dict(run.rollout.parameters)
    usual = {name: value for name, value in given.items() if name not in USUAL}
    found, shown = {}, {}
    after = [path.stem for path in adapters] or ["after"]
    learnt = [(name, [path], given) for name, path in zip(after, adapters or [adapter_of(run)], strict=True)]
    for who, lora, parameters in (("before", [], given), *learnt, ("in the usual steps", [], usual)):
        samples = made(loopwright.load(run.model, lora=lora), prompts, draws, parameters)
        found[who], shown[who] = measured(samples, scorers, draws), list(chunks(samples, draws))
        print(who, json.dumps(found[who]), flush=True)
    pairs = zip(shown["before"], shown[after[-1]], strict=True)
    rows = [[*first[:COLUMNS], *last[:COLUMNS]] for first, last in pairs][:ROWS]
    output = Path(run.output)
    (output / "judged.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    media.write(output / "judged.png", sheet(rows, draws)[None], fps=1, metadata={"prompts": len(prompts)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--set", action="append", default=[], help="as of loopwright train")
    parser.add_argument("--judges", nargs="*", default=[], help="for instance tesseract")
    parser.add_argument("--adapters", nargs="*", type=Path, default=[], help="instead of the run's own")
    parser.add_argument("--draws", type=int, default=4, help="samples of a prompt")
    args = parser.parse_args()
    if args.draws < 2:
        parser.error(f"--draws {args.draws}: two samples of a prompt at least, to see how far they lie apart")
    run = read_run(args.run, args.set)
    if run.rollout is None or run.rollout.held_out is None:
        parser.error(f"{args.run} holds no prompts out: name a file by rollout.held_out")
    scorers = [parse(run.rewards)]
    if args.judges:
        scorers.append(judges(dict.fromkeys(args.judges, 1.0), trained=run.rewards))
    try:
        compare(run, scorers, args.draws, args.adapters)
    finally:
        for scorer in scorers:
            scorer.close()


if __name__ == "__main__":
    main()
