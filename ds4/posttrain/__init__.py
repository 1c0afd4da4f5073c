"""What people's own requests become: a log of them, corrections, and the decisions that those speak of."""
