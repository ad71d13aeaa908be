"""Carrying weights into engines that run in other processes: transports, staging, loading, digests."""
