from django.db import models


class Bill(models.Model):
    number = models.IntegerField()
