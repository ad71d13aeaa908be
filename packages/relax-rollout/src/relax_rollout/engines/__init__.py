"""The engines that come with relax-rollout."""
