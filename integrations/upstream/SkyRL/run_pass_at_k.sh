set -x

# pass@8 advantages on GSM8K, with groups larger than k: only a group with a right and at least 7 wrong responses has a gradient.

# uv run examples/train/gsm8k/gsm8k_dataset.py --output_dir $HOME/data/gsm8k
# bash examples/train/algorithms/pass_at_k/run_pass_at_k.sh

: "${DATA_DIR:="$HOME/data/gsm8k"}"
: "${NUM_GPUS:=4}"
: "${PASS_AT_K:=8}"
export PASS_AT_K

uv run --isolated --extra fsdp -m examples.train.algorithms.pass_at_k.main_pass_at_k \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.algorithm.advantage_estimator=pass_at_k \
  trainer.algorithm.use_kl_in_reward=false \
  trainer.algorithm.use_kl_loss=true \
  trainer.algorithm.advantage_batch_normalize=false \
  trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  generator.inference_engine.num_engines="$NUM_GPUS" \
  generator.n_samples_per_prompt=32 \
  environment.env_class=gsm8k \
  "$@"
