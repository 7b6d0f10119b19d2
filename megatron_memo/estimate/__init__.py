"""What a training run will cost, before anyone queues for GPUs: time and memory by arithmetic."""
