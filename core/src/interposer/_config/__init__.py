"""The policy of the user, and what is kept between processes."""
