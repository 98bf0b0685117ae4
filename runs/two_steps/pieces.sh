# What this folder claims, on one GPU in pieces of less than ten minutes, runs of a piece side by side:
#   bash runs/two_steps/pieces.sh words      # words at three weights of the divergence, shuffled and constant scores
#   bash runs/two_steps/pieces.sh clips
# From the project's folder. $OUT gets each run's metrics, sheets and adapters, for judge.py to choose among.
set -euo pipefail
cd "$(dirname "$0")/../.."
PIECE=$1 OUT=${OUT:-out/two_steps/kept} PYTHON=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
KLS=${KLS:-0.3 1 3} KL=${KL:-1} WORKERS=${WORKERS:-3} SET=${SET:-} # SET: for trying this on a small machine

train() { $PYTHON -m loopwright train "$@" --set checkpoints.every=40 --set checkpoints.keep=9 --set evaluation.every=40 $SET; }
run() { # its name, its file, settings
  local name=$1 file=$2; shift 2
  # one that fails is told, and keeps no other's results from being kept
  train "runs/two_steps/$file" --set "output=out/two_steps/$name" "$@" > "out/two_steps/$name.log" 2>&1 ||
    { echo "FAILED: $name"; tail -n 12 "out/two_steps/$name.log"; touch "out/two_steps/$name.failed"; }
}
control() { # which one, epochs
  run "$1" words.yaml --set "nft.kl=$KL" --set "epochs=$2" \
    --set "rewards={\"runs/two_steps/controls.py:$1\": {\"weight\": 1.0, \"workers\": $WORKERS}}" \
    --set "evaluation.judges={\"ocr\": {\"weight\": 1.0, \"frames\": 1, \"workers\": $WORKERS}}"
}
keep() { # what is worth carrying of a run
  [ ! -e "out/two_steps/$1.failed" ] || { FAILED=1; return 0; }
  mkdir -p "$OUT/$1"
  cp -r "out/two_steps/$1/metrics.csv" "out/two_steps/$1/previews" "out/two_steps/$1/run.yaml" "$OUT/$1/"
  $PYTHON runs/two_steps/adapters.py "out/two_steps/$1" --output "$OUT/$1/adapters"
}

$PYTHON runs/two_steps/prompts.py
rm -f out/two_steps/*.failed
RUNS=() FAILED=0
case $PIECE in
words)
  for kl in $KLS; do
    RUNS+=("words_$kl")
    run "words_$kl" words.yaml --set "nft.kl=$kl" --set epochs=40 --set "rewards.ocr.workers=$WORKERS" &
  done
  RUNS+=(shuffled constant)
  control shuffled 40 &
  control constant 10 &
  ;;
clips)
  RUNS+=(clips)
  run clips clips.yaml --set "nft.kl=$KL" --set epochs=60 &
  ;;
*)
  echo "no such piece: $PIECE; words or clips"
  exit 2
  ;;
esac
wait
for name in "${RUNS[@]}"; do keep "$name"; done
exit "$FAILED"
