"""Fine-tuning of checkpoints whose experts are off memory."""
