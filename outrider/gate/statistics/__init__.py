"""What two measurements say: pairs, equal scores, equal distributions, and the noise of speeds."""
