"""Trainer back ends: whose loop carries an on-policy solver."""
