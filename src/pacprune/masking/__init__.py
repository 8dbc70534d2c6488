"""What is prunable, what ranks it, and stochastic masks on any module."""
