"""Feeds as sites publish them: RSS 2.0, Atom 1.0 and RSS 1.0 (RDF)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import format_datetime
from xml.sax.saxutils import escape, quoteattr


@dataclass(frozen=True)
class Item:
    guid: str
    title: str
    link: str
    published: datetime


# Arguments: the feed's title, its address, and its items with the newest first.
Writer = Callable[[str, str, Sequence[Item]], bytes]


def rss20(title: str, home: str, items: Sequence[Item]) -> bytes:
    entries = "".join(
        f"""
    <item>
      <title>{escape(item.title)}</title>
      <link>{escape(item.link)}</link>
      <guid isPermaLink="false">{escape(item.guid)}</guid>
      <pubDate>{format_datetime(item.published)}</pubDate>
      <dc:creator>The editors</dc:creator>
      <content:encoded><![CDATA[<p>About <em>{item.title}</em>.</p>]]></content:encoded>
    </item>"""
        for item in items
    )
    return f"""<?xml version="1.0" encoding="UTF-8"?>
<rss version="2.0" xmlns:content="http://purl.org/rss/1.0/modules/content/"
     xmlns:dc="http://purl.org/dc/elements/1.1/" xmlns:atom="http://www.w3.org/2005/Atom">
  <channel>
    <title>{escape(title)}</title>
    <link>{escape(home)}</link>
    <atom:link href={quoteattr(home)} rel="self" type="application/rss+xml"/>
    <description>News of {escape(title)}</description>
    <language>en</language>
    <ttl>60</ttl>{entries}
  </channel>
</rss>
""".encode()


def atom(title: str, home: str, items: Sequence[Item]) -> bytes:
    entries = "".join(
        f"""
  <entry>
    <id>{escape(item.guid)}</id>
    <title type="text">{escape(item.title)}</title>
    <link rel="alternate" href={quoteattr(item.link)}/>
    <published>{item.published.isoformat()}</published>
    <updated>{item.published.isoformat()}</updated>
    <content type="xhtml">
      <div xmlns="http://www.w3.org/1999/xhtml"><p>About {escape(item.title)}.</p></div>
    </content>
  </entry>"""
        for item in items
    )
    return f"""<?xml version="1.0" encoding="utf-8"?>
<feed xmlns="http://www.w3.org/2005/Atom" xml:lang="en">
  <id>{escape(home)}</id>
  <title>{escape(title)}</title>
  <link rel="self" href={quoteattr(home)}/>
  <author><name>The editors</name></author>
  <updated>{items[0].published.isoformat()}</updated>{entries}
</feed>
""".encode()


def rss10(title: str, home: str, items: Sequence[Item]) -> bytes:
    contents = "".join(f"\n        <rdf:li rdf:resource={quoteattr(item.guid)}/>" for item in items)
    entries = "".join(
        f"""
  <item rdf:about={quoteattr(item.guid)}>
    <title>{escape(item.title)}</title>
    <link>{escape(item.link)}</link>
    <dc:date>{item.published.isoformat()}</dc:date>
  </item>"""
        for item in items
    )
    # Many of these old feeds are in Latin-1.
    return f"""<?xml version="1.0" encoding="ISO-8859-1"?>
<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"
         xmlns:dc="http://purl.org/dc/elements/1.1/" xmlns="http://purl.org/rss/1.0/">
  <channel rdf:about={quoteattr(home)}>
    <title>{escape(title)}</title>
    <link>{escape(home)}</link>
    <description>News of {escape(title)}</description>
    <items>
      <rdf:Seq>{contents}
      </rdf:Seq>
    </items>
  </channel>{entries}
</rdf:RDF>
""".encode("iso-8859-1", "xmlcharrefreplace")


def malformed(title: str, home: str, items: Sequence[Item]) -> bytes:
    """Return an RSS document that ends in the middle of its last item."""
    return rss20(title, home, items).rpartition(b"</title>")[0]
