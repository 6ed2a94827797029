// Google's storage as fake-gcs-server has it, with three parts of the XML API that it lacks and deltalake uses:
// PUT of an object, its condition, where a listing starts; and an endpoint for tokens.
package main

import (
	"encoding/json"
	"encoding/xml"
	"flag"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/fsouza/fake-gcs-server/fakestorage"
)

func main() {
	port := flag.Int("port", 0, "where to listen")
	bucket := flag.String("bucket", "bucket", "to make at the start")
	flag.Parse()
	host := fmt.Sprintf("127.0.0.1:%d", *port)
	server, err := fakestorage.NewServerWithOptions(fakestorage.Options{
		NoListener: true, PublicHost: host, ExternalURL: "http://" + host, Scheme: "http",
	})
	if err != nil {
		log.Fatal(err)
	}
	server.CreateBucketWithOpts(fakestorage.CreateBucketOpts{Name: *bucket})
	logger := log.New(os.Stdout, "", 0)
	log.Fatal(http.ListenAndServe(host, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		logger.Printf("%q", fmt.Sprintf("%s %s HTTP", r.Method, r.URL.RequestURI()))
		if r.URL.Path == "/token" {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"access_token": "token", "token_type": "Bearer", "expires_in": 3600}`)
			return
		}
		if r.Method == http.MethodGet && r.URL.Query().Get("list-type") == "2" {
			list(server, *bucket, w, r.URL.Query())
			return
		}
		prefix := "/" + *bucket + "/"
		if r.Method == http.MethodPut && strings.HasPrefix(r.URL.Path, prefix) && r.URL.RawQuery == "" {
			query := url.Values{"uploadType": {"media"}, "name": {strings.TrimPrefix(r.URL.Path, prefix)}}
			if generation := r.Header.Get("x-goog-if-generation-match"); generation != "" {
				query.Set("ifGenerationMatch", generation)
			}
			r.Method, r.URL.Path, r.URL.RawPath = http.MethodPost, "/upload/storage/v1/b/"+*bucket+"/o", ""
			r.URL.RawQuery = query.Encode()
			r.RequestURI = r.URL.RequestURI()
			answer := httptest.NewRecorder()
			server.HTTPHandler().ServeHTTP(answer, r)
			var put struct{ Etag, Generation string }
			if answer.Code == http.StatusOK && json.Unmarshal(answer.Body.Bytes(), &put) == nil {
				w.Header().Set("ETag", fmt.Sprintf("%q", put.Etag))
				w.Header().Set("x-goog-generation", put.Generation)
			}
			w.WriteHeader(answer.Code)
			return
		}
		server.HTTPHandler().ServeHTTP(w, r)
	})))
}

func list(server *fakestorage.Server, bucket string, w http.ResponseWriter, query url.Values) {
	after := query.Get("start-after")
	options := fakestorage.ListOptions{
		Prefix: query.Get("prefix"), Delimiter: query.Get("delimiter"), StartOffset: after,
	}
	found, err := server.ListObjectsWithOptionsPaginated(bucket, options)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	result := fakestorage.ListBucketResult{Name: bucket, Delimiter: options.Delimiter, Prefix: options.Prefix}
	for _, prefix := range found.Prefixes {
		result.CommonPrefixes = append(result.CommonPrefixes, fakestorage.CommonPrefix{Prefix: prefix})
	}
	for _, object := range found.Objects {
		if object.Name == after {
			continue
		}
		result.Contents = append(result.Contents, fakestorage.Contents{
			Key: object.Name, Generation: object.Generation, Size: object.Size,
			LastModified: object.Updated.Format(time.RFC3339), ETag: fakestorage.ETag{Value: object.Etag},
		})
	}
	result.KeyCount = len(result.Contents)
	w.Header().Set("Content-Type", "application/xml")
	if err := xml.NewEncoder(w).Encode(result); err != nil {
		log.Print(err)
	}
}
