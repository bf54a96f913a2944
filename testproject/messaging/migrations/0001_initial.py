import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Channel",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=100)),
                ("mailbox", models.TextField(help_text="Path of an mbox file.")),
                ("page_size", models.PositiveIntegerField(default=20)),
                ("cursor", models.PositiveIntegerField(default=0)),
            ],
        ),
        migrations.CreateModel(
            name="Message",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("number", models.PositiveIntegerField()),
                ("message_id", models.TextField(blank=True)),
                ("sender", models.TextField(blank=True)),
                ("subject", models.TextField(blank=True)),
                ("sent_at", models.DateTimeField(blank=True, null=True)),
                ("body", models.TextField(blank=True)),
                (
                    "channel",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="messages", to="messaging.channel"
                    ),
                ),
            ],
            options={
                "indexes": [models.Index(fields=["channel", "number"], name="message_channel_number")],
            },
        ),
    ]
