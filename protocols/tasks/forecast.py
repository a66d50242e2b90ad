"""Forecast: predict the numbers that come next."""

from fleetune.protocols.tasks.losses import QUANTILE
from fleetune.protocols.tasks.regression import MAE, R2, RMSE, Regression


class Forecast(Regression):
    """Regression whose labels are the values of the horizon, in order."""

    kind = "forecast"
    losses = ("absolute", "squared", "huber", QUANTILE)
    scores = (MAE, RMSE, R2)
