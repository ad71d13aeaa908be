"""What lets the published SGLang wheel serve on a CPU."""
