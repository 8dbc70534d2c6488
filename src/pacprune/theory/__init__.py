"""Stochastic masks where every quantity has a closed form: linear regression, linearised networks."""
