"""How many steps a run shall have in all, to end after so many more seconds at the speed it has had.

    loopwright train text_to_video.py --set steps=$(python steps.py state/text_to_video --seconds 300)

Learning rates fall by steps, and time is what is lent: so a run is begun, stopped, and continued by what this says.
"""

import argparse
from pathlib import Path

from loopwright.training.checkpoint import found
from loopwright.training.run import read
from loopwright.training.sinks import table


def steps(output: Path, seconds: float) -> int:
    """Those of the newest checkpoint, and as many as so many seconds have room for."""
    rate = table(output / "metrics.csv")[-1]["samples_per_second"] / read(output / "run.yaml").batch_size
    return int(found(output / "checkpoints")[0].name.removeprefix("step-")) + max(int(rate * seconds), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    print(steps(args.output, args.seconds))


if __name__ == "__main__":
    main()
