"""The demo checkpoint and what made it: scenes, prompts, training, judging."""
