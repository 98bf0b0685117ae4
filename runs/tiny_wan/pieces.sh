# All of tiny-wan's training on one GPU, in three pieces of less than ten minutes: bash pieces.sh 1, then 2, then 3.
# What must outlive the machine goes to $OUT in files of less than 16 MB: the average of what has been trained so far,
# and at the end the model and what is to be judged. Everything else stays in state/.
set -euo pipefail
cd "$(dirname "$0")"
PIECE=$1 OUT=${OUT:-state/out} PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
# seconds of training after the first PROBE ones, which compile and tell how fast it is
FRAMES=${FRAMES:-100} CLIPS=${CLIPS:-170} LATENTS_2=${LATENTS_2:-325} LATENTS_3=${LATENTS_3:-310} PROBE=${PROBE:-95}
BEGIN=${BEGIN:-35} ENCODE=${ENCODE:-90} # seconds to begin again, and to make latents and captions
SET=${SET:-} PROMPTS=${PROMPTS:-500} # settings for trying this on a small machine

train() { $PYTHON -m loopwright train "$@" $SET; }
# for at most so many seconds; 130 says that the run was stopped and can be continued
some() { local limit=$1; shift; timeout --foreground --preserve-status -s INT "$limit" $PYTHON -m loopwright train "$@" $SET || [ $? = 130 ]; }
total() { echo "steps=$($PYTHON steps.py "state/$1" --seconds "$2")"; }
pack() { tar -C "$1" -ch . | split -b 15m - "$OUT/$2.tar."; }
told() { echo "t $SECONDS: $*"; }

case $PIECE in
1)
  $PYTHON start.py --output state/fresh
  some "$PROBE" autoencoder_frames.py
  train autoencoder_frames.py --set "$(total frames "$FRAMES")"
  told frames
  $PYTHON start.py --autoencoder state/frames/model-ema --still --output state/clips_start
  some "$PROBE" autoencoder.py
  train autoencoder.py --set "$(total clips "$CLIPS")"
  told clips
  $PYTHON start.py --autoencoder state/clips/model-ema --sprites sprites.npz --output state/start
  pack state/start/vae vae
  ;;
2)
  some "$((ENCODE + PROBE))" text_to_video.py
  STEPS=$(total text_to_video "$((LATENTS_2 + LATENTS_3))")
  echo "$STEPS" >state/steps
  some "$((BEGIN + LATENTS_2))" text_to_video.py --set "$STEPS"
  $PYTHON average.py state/text_to_video --start state/start --output state/average
  pack state/average/transformer average
  told average
  ;;
3)
  some "$((BEGIN + LATENTS_3 + 20))" text_to_video.py --set "$(cat state/steps)"
  $PYTHON average.py state/text_to_video --start state/start --output state/average
  pack state/average model
  told trained
  $PYTHON evaluate.py generate state/average --prompts "$PROMPTS" --output judged
  tar -C judged -c . | split -b 15m - "$OUT/judged.tar."
  ;;
esac
tar -c $(ls state/*/metrics.csv) | split -b 15m - "$OUT/metrics.tar."
told "end of piece $PIECE"
