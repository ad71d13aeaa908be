"""Qwen3.5's vision tower: patches of pictures in, features in the place of picture tokens out."""
