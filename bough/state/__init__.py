"""The mechanism of state: kinds, the pool, live states, and the steps that change them. Never the tree."""
