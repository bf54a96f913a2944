from importlib import import_module

from django.db import migrations, models

first = import_module("angee_jobs.migrations.0001_initial")


class Migration(migrations.Migration):
    dependencies = [("angee_jobs", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="LockMember",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "digest", "number", blank=True, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("digest", models.CharField(max_length=64, verbose_name="digest of the name")),
                ("number", models.IntegerField(help_text="From 1000 on: a shared hold.", verbose_name="place")),
                ("name", models.TextField(verbose_name="name")),
                (
                    "owner",
                    models.CharField(
                        help_text="Empty: nobody holds it.", max_length=64, verbose_name="hash of the owner id"
                    ),
                ),
                (
                    "holder",
                    models.TextField(help_text="Host, process, thread and task, as JSON.", verbose_name="holder"),
                ),
                ("acquired_at", models.DateTimeField(verbose_name="acquired at")),
                (
                    "expires_at",
                    models.DateTimeField(help_text="Of a free place: when it was released.", verbose_name="expires at"),
                ),
                ("fencing_token", models.BigIntegerField(verbose_name="fencing token")),
            ],
            options={
                "verbose_name": "place of a lock",
                "verbose_name_plural": "places of locks",
                "default_permissions": ("view",),
            },
        ),
        first.OnPostgreSQL(
            first.HOT_TABLE.replace("angee_jobs_tasklock", "angee_jobs_lockmember"),
            reverse_sql=migrations.RunSQL.noop,
        ),
    ]
