# All of tiny-wan's training on one GPU, in four pieces of less than ten minutes: bash pieces.sh 1, then 2, 3 and 4. What
# must outlive the machine goes to $OUT in files of less than 16 MB, everything else stays in state/.
set -euo pipefail
cd "$(dirname "$0")"
PIECE=$1 OUT=${OUT:-state/out} PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
HALF=${HALF:-535} # seconds after which the transformer's run is stopped, to be continued in the last piece
SET=${SET:-} PROMPTS=${PROMPTS:-500} # settings for trying this on a small machine

train() { $PYTHON -m loopwright train "$@" $SET; }
# for at most so many seconds; 130 says that the run was stopped and can be continued
some() { local limit=$1; shift; timeout --foreground --preserve-status -s INT "$limit" $PYTHON -m loopwright train "$@" $SET || [ $? = 130 ]; }
pack() { tar -C "$1" -ch . | split -b 15m - "$OUT/$2.tar."; }
told() { echo "t $SECONDS: $*"; }

case $PIECE in
1)
  $PYTHON start.py --output state/fresh
  train autoencoder_frames.py
  told frames
  $PYTHON start.py --autoencoder state/frames/model-ema --still --output state/clips_start
  train autoencoder.py --set output=state/clips_1 --set steps=1500
  pack state/clips_1/model-ema/vae vae
  ;;
2)
  $PYTHON start.py --autoencoder state/clips_1/model-ema --keep --output state/clips_start
  train autoencoder.py
  told clips
  $PYTHON start.py --autoencoder state/clips/model-ema --sprites sprites.npz ${CARRIED:+--transformer "$CARRIED"} --output state/start
  pack state/start/vae vae
  ;;
3)
  some "$HALF" text_to_video.py
  $PYTHON average.py state/text_to_video --start state/start --output state/average
  pack state/average/transformer average
  ;;
4)
  train text_to_video.py
  $PYTHON average.py state/text_to_video --start state/start --output state/average
  $PYTHON ship.py state/average --output state/shipped/tiny-wan
  told trained
  pack state/shipped model
  $PYTHON evaluate.py generate state/average --prompts "$PROMPTS" --output judged
  tar -C judged -c . | split -b 15m - "$OUT/judged.tar."
  ;;
esac
tar -c $(ls state/*/metrics.csv) | split -b 15m - "$OUT/metrics.tar."
told "end of piece $PIECE"
