"""The prefix cache: which prefixes are kept, on which tier, and what is given up first. Policy, never tensors."""
